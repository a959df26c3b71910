"""Every refusal of the API is `{"error": "one line that says what to do"}` with the right status."""

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from gradient_server.db.errors import DatabaseError
from gradient_server.storage.durable import StorageError, StorageFullError

__all__ = ["ApiError", "ErrorAnswer", "install_errors"]

_NO_SUCH_PLACE = "there is nothing here: /openapi.json lists what there is"
_WRONG_METHOD = "this method is not for here: /openapi.json lists what there is"


class ErrorAnswer(BaseModel):
    """What every refusal carries."""

    error: str


class ApiError(HTTPException):
    """A refusal: its status, and one line for whoever asked."""

    def __init__(self, status: HTTPStatus, error: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status.value, error, headers)


def install_errors(app: FastAPI) -> None:
    """Makes every refusal an answer of the one shape. What is unexpected is for `Requests` (limits.py)."""
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(DatabaseError, _unavailable)
    app.add_exception_handler(StorageError, _no_storage)


def _answer(status: int, error: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": error}, status, headers)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    text = str(error.detail)
    if not isinstance(error, ApiError):
        generic = {HTTPStatus.NOT_FOUND: _NO_SUCH_PLACE, HTTPStatus.METHOD_NOT_ALLOWED: _WRONG_METHOD}
        text = generic.get(HTTPStatus(error.status_code), text)
    return _answer(error.status_code, text, dict(error.headers or {}))


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, "the body is not JSON")
    if first["type"] in ("model_attributes_type", "missing") and first["loc"] == ("body",):
        text = "send a JSON object, with Content-Type: application/json"
        return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, text)
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return _answer(
        HTTPStatus.UNPROCESSABLE_ENTITY, f"{where}: {_one_line(first['msg'].removeprefix('Value error, '))}"
    )


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    return _answer(HTTPStatus.SERVICE_UNAVAILABLE, _one_line(str(error)))


async def _no_storage(_request: Request, error: Exception) -> JSONResponse:
    full = isinstance(error, StorageFullError)
    status = HTTPStatus.INSUFFICIENT_STORAGE if full else HTTPStatus.SERVICE_UNAVAILABLE
    return _answer(status, _one_line(str(error)))


def _one_line(text: str) -> str:
    return " ".join(text.split())
