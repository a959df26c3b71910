"""Who may do what (operations.md, HTTP): writing needs an API key; so does reading from elsewhere.

A key that is bound to a project acts on that project and sees no other; a key that is not is good
for everything.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from gradient_server.db.queries.registry import ApiKey, find_api_key
from gradient_server.web.errors import ApiError
from gradient_server.web.state import Web, WebDep

__all__ = ["Access", "Admin", "Overseer", "Reader", "Writer", "is_local"]

_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
_NEEDED: Final = "an API key is needed: set GRADIENT_API_KEY_FILE to the file the server printed at its start"
_WRONG: Final = "this API key is not known here: use the one in the server's api-key file, or make another"
_BOUND: Final = "this key is bound to a project: use a key that is good for the whole server"
# Whoever passes requests on says so; then the address is not that of the reader.
_PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

_bearer = HTTPBearer(auto_error=False, description="An API key, from `gradient key create`.")


@dataclass(frozen=True, slots=True)
class Access:
    """What a request may see and touch. `project` None: everything."""

    key: ApiKey | None
    project: str | None

    def sees(self, projects: Collection[str]) -> bool:
        """Whether something that these projects (ids) share may be shown."""
        return self.project is None or self.project in projects

    def require(self, project: str, name: str) -> None:
        """ApiError 403 unless it may act on the project."""
        if self.project not in (None, project):
            raise ApiError(HTTPStatus.FORBIDDEN, f"this key is not for the project {name!r}: use one that is")


def is_local(request: Request) -> bool:
    """Whether it comes from this very host, by its address and by the name it called us.

    A page of somebody else's, open in a browser on this host, has an address of this host too; but
    the name that the browser asked for is the page's own.
    """
    client = request.client
    if client is None or any(header in request.headers for header in _PROXY_HEADERS):
        return False
    try:
        address = ipaddress.ip_address(client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback and _is_own_name(request.url.hostname or "")


def _is_own_name(host: str) -> bool:
    if "." not in host and ":" not in host:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.endswith(".localhost")
    return True


async def _find(web: Web, credentials: HTTPAuthorizationCredentials | None) -> Access | None:
    if credentials is None:
        return None
    text = credentials.credentials
    key = await web.services.database.read(lambda connection: find_api_key(connection, text))
    if key is None:
        raise ApiError(HTTPStatus.UNAUTHORIZED, _WRONG, _CHALLENGE)
    return Access(key, key.project)


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def _reading(request: Request, web: WebDep, credentials: Credentials) -> Access:
    access = await _find(web, credentials)
    if access is not None:
        return access
    if not is_local(request):
        raise ApiError(HTTPStatus.UNAUTHORIZED, _NEEDED, _CHALLENGE)
    return Access(None, None)


async def _writing(web: WebDep, credentials: Credentials) -> Access:
    access = await _find(web, credentials)
    if access is None:
        raise ApiError(HTTPStatus.UNAUTHORIZED, _NEEDED, _CHALLENGE)
    return access


async def _administering(access: Annotated[Access, Depends(_writing)]) -> Access:
    if access.project is not None:
        raise ApiError(HTTPStatus.FORBIDDEN, _BOUND)
    return access


async def _overseeing(access: Annotated[Access, Depends(_reading)]) -> Access:
    if access.project is not None:
        raise ApiError(HTTPStatus.FORBIDDEN, _BOUND)
    return access


Reader = Annotated[Access, Depends(_reading)]
Writer = Annotated[Access, Depends(_writing)]
Admin = Annotated[Access, Depends(_administering)]
# Reads what is of all projects.
Overseer = Annotated[Access, Depends(_overseeing)]
