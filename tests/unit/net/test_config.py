"""Options of the server: precedence, complaints that help, and secrets that stay out of the log."""

from pathlib import Path

import pytest
from gradient_server.config import OPTIONS, ConfigError, Loaded, load, without_secrets


def loaded(
    tmp_path: Path, text: str = "", environment: dict[str, str] | None = None, **flags: object
) -> Loaded:
    file = tmp_path / "server.toml"
    file.write_text(text)
    return load(file=file, environment=environment or {}, flags=flags)


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    text = 'port = 1\nbaseDir = "/from/file"\n[proto]\nmaxConnections = 7\n'
    result = loaded(
        tmp_path, text, {"GRADIENT_PORT": "2", "GRADIENT_PROTO_RECONNECT_GRACE_SECS": "5"}, port="3"
    )
    assert result.config.port == 3
    assert result.config.base_dir == Path("/from/file")
    assert result.config.proto_max_connections == 7
    assert result.config.proto_reconnect_grace_secs == 5.0
    assert result.origins["port"] == "--port"
    assert result.origins["proto.reconnectGraceSecs"] == "GRADIENT_PROTO_RECONNECT_GRACE_SECS"
    assert result.config.database_url == "sqlite:////from/file/gradient.db"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot = 1", "unknown key `prot`; did you mean `port`?"),
        ("[proto]\nmaxConections = 1", "did you mean `proto.maxConnections`?"),
        ("port = true", "port (.*): a whole number, 0 or more, is wanted, not True"),
        ("port = 70000", "0 to 65535"),
        ('baseDir = "a\\u0000"', "baseDir (.*): text without NUL is wanted"),
        ('[proto]\nlisten = ["unix:///a\\u0000"]', "text without NUL is wanted"),
        ("[build]\nmaxAttempts = 0", "1 or more"),
        ("[scheduler]\nclusterPrepareTimeoutSecs = 0", "a number, 1 or more"),
        ("[worker]\nzone = 'a'", "belongs into the file of gradient-worker"),
        ("[proto]\nlisten = 'tls://0.0.0.0:1'", "set proto.tlsCert and proto.tlsKey"),
        ("[proto]\ntlsCert = '/c'", "set without proto.tlsKey; set both"),
        ("[database]\nurl = 'mysql://x'", "must be sqlite"),
        ("[database]\nurl = 'postgresql://u:hunter2@h/d'", "set proto.advertiseUrl"),
        ("proto = 3", r"`proto` must be a table: \[proto\]"),
        ("port = [", "is no TOML file"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        loaded(tmp_path, text)
    assert "hunter2" not in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_variable_is_a_warning(tmp_path: Path) -> None:
    environment = {"GRADIENT_PRT": "1", "GRADIENT_WORKER_ZONE": "a", "GRADIENT_URL": "http://x", "PATH": "/"}
    result = loaded(tmp_path, "", environment)
    assert result.warnings == ("unknown variable GRADIENT_PRT; did you mean GRADIENT_PORT?",)


def test_the_password_of_the_database_is_not_shown(tmp_path: Path) -> None:
    url = "postgresql://grad:hunter2@db/gradient?password=hunter2"
    result = loaded(tmp_path, "", {"GRADIENT_DATABASE_URL": url}, proto_advertise_url="tls://me:1")
    assert result.config.database_url == url
    assert "hunter2" not in str(result.effective())
    assert "hunter2" not in repr(result.config)
    assert without_secrets(url) == "postgresql://grad:***@db/gradient?***"


def test_variables_and_flags_follow_from_the_key() -> None:
    by_key = {option.key: option for option in OPTIONS}
    heartbeat = by_key["proto.workerHeartbeatTimeoutSecs"]
    assert heartbeat.variable == "GRADIENT_PROTO_WORKER_HEARTBEAT_TIMEOUT_SECS"
    assert heartbeat.flag == "--proto-worker-heartbeat-timeout-secs"
    assert by_key["insecurePlaintext"].flag == "--insecure-plaintext"


def test_credentials_of_the_service_manager_stand_in_for_what_nobody_configured(tmp_path: Path) -> None:
    given = tmp_path / "credentials"
    given.mkdir()
    (given / "gradient-server.tls-cert").write_text("cert")
    (given / "gradient-server.tls-key").write_text("key")
    (given / "gradient-server.database-url").write_text("postgresql://u:hunter2@h/d\n")
    environment = {"CREDENTIALS_DIRECTORY": str(given), "GRADIENT_PROTO_ADVERTISE_URL": "tls://h:1"}
    result = loaded(tmp_path, "[proto]\ntlsKey = '/my/key'\n", environment)
    assert result.config.proto_tls_cert == given / "gradient-server.tls-cert"
    assert result.config.proto_tls_key == Path("/my/key")
    assert result.config.database_url == "postgresql://u:hunter2@h/d"
    assert result.origins["proto.tlsCert"] == "credential gradient-server.tls-cert"
    assert "hunter2" not in str(result.effective())
    (given / "gradient-server.database-url").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"database.url: the credential .* cannot be read"):
        loaded(tmp_path, "", environment)
    assert loaded(tmp_path, "", {"CREDENTIALS_DIRECTORY": str(tmp_path)}).config.proto_tls_cert is None
