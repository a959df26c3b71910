import pytest
from gradient_server.web.auth import is_local
from starlette.requests import Request


def request(client: tuple[str, int] | None, host: str = "localhost", **headers: str) -> Request:
    sent = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/",
            "scheme": "http",
            "query_string": b"",
            "client": client,
            "server": ("0.0.0.0", 3000),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost:3000", "127.0.0.1:3000", "[::1]:3000", "builds", "x.localhost"])
def test_this_host_is_local(address: str, host: str) -> None:
    assert is_local(request((address, 1), host))


@pytest.mark.parametrize("address", ["10.0.0.1", "192.0.2.7", "2001:db8::1", "::ffff:10.0.0.1", "unix", ""])
def test_other_hosts_are_not(address: str) -> None:
    assert not is_local(request((address, 1)))


def test_no_address_is_not_local() -> None:
    assert not is_local(request(None))


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded", "x_real_ip", "via"])
def test_what_a_proxy_passes_on_is_not_local(header: str) -> None:
    assert not is_local(request(("127.0.0.1", 1), **{header: "192.0.2.7"}))


def test_a_page_of_somebody_elses_that_a_browser_here_shows_is_not_local() -> None:
    assert not is_local(request(("127.0.0.1", 1), "rebound.example.org"))
