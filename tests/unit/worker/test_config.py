"""Options from three places."""

import re
from pathlib import Path

import pytest
from gradient_worker.config import OPTIONS, ConfigError, Loaded, load


def loaded(file: Path | None = None, environment: dict[str, str] | None = None, **flags: str) -> Loaded:
    return load(file=file, environment=environment or {}, flags=flags, hostname="host", cpu_count=6)


def written(directory: Path, text: str) -> Path:
    file = directory / "worker.toml"
    file.write_text(text)
    return file


def test_defaults_follow_the_host() -> None:
    config = loaded().config
    assert config.build_max_concurrent == 6
    assert config.name == "host"
    assert config.base_dir == Path("/var/lib/gradient-worker")
    assert config.peers_file == Path("/var/lib/gradient-worker/peers")
    assert config.log_burst_bytes_per_min == 8 * 1024 * 1024


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[worker]\nzone = "file"\nname = "file"\n[worker.build]\nmaxConcurrent = 3\n')
    environment = {"GRADIENT_WORKER_ZONE": "env", "GRADIENT_WORKER_NAME": "env", "HOME": "/"}
    result = loaded(file, environment, zone="flag")
    assert (result.config.zone, result.config.name, result.config.build_max_concurrent) == ("flag", "env", 3)
    assert result.origins["worker.zone"] == "--zone"
    assert result.origins["worker.name"] == "GRADIENT_WORKER_NAME"
    assert result.origins["worker.build.maxConcurrent"] == str(file)
    assert result.origins["worker.store"] == "default"
    assert not result.warnings


def test_names_of_the_specification() -> None:
    names = {option.key: (option.variable, option.flag) for option in OPTIONS}
    assert names["worker.serverUrl"] == ("GRADIENT_WORKER_SERVER_URL", "--server-url")
    assert names["worker.system.cpuCoreScore"] == (
        "GRADIENT_WORKER_SYSTEM_CPU_CORE_SCORE",
        "--system-cpu-core-score",
    )
    assert names["worker.build.maxConcurrent"] == (
        "GRADIENT_WORKER_BUILD_MAX_CONCURRENT",
        "--build-max-concurrent",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[worker]\nserverUr = "x"\n', "did you mean `worker.serverUrl`?"),
        ("[worker.build]\nmaxConcurent = 1\n", "did you mean `worker.build.maxConcurrent`?"),
        ("[server]\n", "unknown key `server`"),
        ("[worker]\nzone = 3\n", "worker.zone"),
        ("[worker.build]\nmaxConcurrent = -1\n", "a whole number"),
        ("[worker.build]\nmaxConcurrent = true\n", "a whole number"),
        ('[worker]\nstore = "nix"\n', "the Nix store is not part of this version"),
        ('[worker]\nzone = "a\\u0000"\n', "text without NUL is wanted"),
        ("worker = 3\n", "must be a table"),
        ("[worker\n", "is no TOML file"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        loaded(written(tmp_path, text))
    assert "\n" not in str(raised.value).replace(" at line", "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        loaded(tmp_path / "nowhere")


def test_an_unknown_variable_is_a_warning_that_names_the_nearest() -> None:
    result = loaded(environment={"GRADIENT_WORKER_ZOME": "x"})
    assert result.warnings == ("unknown variable GRADIENT_WORKER_ZOME; did you mean GRADIENT_WORKER_ZONE?",)


def test_lists_and_numbers_from_text() -> None:
    config = loaded(system_architectures="x86_64-linux, i686-linux", drain_timeout_secs="1.5").config
    assert config.system_architectures == ("x86_64-linux", "i686-linux")
    assert config.drain_timeout_secs == 1.5
    with pytest.raises(ConfigError, match=r"worker\.drainTimeoutSecs"):
        loaded(drain_timeout_secs="soon")


def test_a_pin_and_a_ca_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        loaded(server_ca_file="ca.pem", server_fingerprint="ab" * 32)
    assert loaded(server_fingerprint="AB:" * 31 + "AB").config.server_fingerprint == "ab" * 32
