"""Agents and runners are killed, leave and stay away, in each stage of a job."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.alter import altered
from tests.acceptance.counting import Cost, Counting, Under, begin
from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import is_alive, wait_until
from tests.acceptance.relay import Relay
from tests.acceptance.trees import Build

AGENT_DEATHS = 2

# What the agent was doing when it was killed, and the frame at which it was: not one before it is lost,
# and neither this one nor any behind it arrives.
STAGES = {
    "evaluates": ("making", "> JobUpdate EvalResult", None),
    "fetches inputs": ("using", "< NarPush", None),
    "has built": ("using", "> JobUpdate BuildOutput", None),
    "uploads": ("using", "> UploadChunk", None),
    "has reported, unacknowledged": ("using", "< ReportAck", "> JobCompleted"),
}


@dataclass(frozen=True)
class Crowd:
    """`making` evaluates and makes what `using` needs; each behind a relay."""

    pool: Pool
    relays: dict[str, Relay]


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    """Retries are quick, and there are two. Some tests start more workers, which they end."""
    with Pool() as pool, ExitStack() as stack:
        pool.start_server(
            "--build-retry-backoff-secs", "0.2", "--scheduler-scoring-policy", "simple",
            "--build-max-attempts", "2",
        )  # fmt: skip
        relays = {}
        for name, evaluations in (("making", "1"), ("using", "0")):
            relay = Relay(pool.directory / f"relay-{name}", pool.directory / "socket")
            relays[name] = stack.enter_context(relay)
            flags = ("--system-features", name, "--eval-max-concurrent", evaluations)
            pool.start_worker(name, *flags, url=relay.url, wait=False)
        pool.wait_connected(*relays)
        yield Crowd(pool, relays)
        for name in list(pool.workers):
            pool.stop_worker(name)  # before its relay, behind which it could not say goodbye


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Whatever became of a test, its builds end."""
    tmp_path.chmod(0o777)
    yield
    (tmp_path / "go").touch()


@pytest.mark.parametrize("stage", STAGES)
def test_an_agent_is_killed_while_it(crowd: Crowd, tmp_path: Path, cost: Cost, stage: str) -> None:
    pool = crowd.pool
    number = list(STAGES).index(stage)
    victim, step, behind = STAGES[stage]
    making = Counting(f"making-{number}", tmp_path, more={"features": ["making"]})
    more = {"features": ["using"], "inputs": [making.name]}
    using = Counting(f"using-{number}", tmp_path, before="echo begun;", more=more)
    relay = crowd.relays[victim]
    relay.stop_at(step, behind=behind)
    making.go()
    evaluation = pool.submit(pool.tree(making.build, using.build))
    relay.wait_stopped()
    cost.begin(f"agent killed while it {stage}")
    pool.workers[victim].process.end(signal.SIGKILL)
    relay.let_go()
    pool.restart_worker(victim)
    pool.wait_connected(victim)
    view = pool.ended(evaluation)
    cost.useful()
    assert view["status"] == "Completed", view
    assert (making.starts(), using.starts()) == (1, 1)
    build = by_name(view)[using.name]["id"]
    attempts = pool.get(f"/jobs/build:{build}")["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["Completed"]
    assert pool.log_bytes(f"build:{build}") == b"begun\nend\n"


def in_mid_build(pool: Pool, name: str, directory: Path, before: str = "", *flags: str) -> Under:
    """A worker of its own with a build of its own."""
    pool.start_worker(f"host-{name}", "--system-features", name, *flags)
    return begin(pool, Counting(f"{name}-1.0", directory, before, {"features": [name]}))


def kill_agent_and_runner(pool: Pool, worker: str) -> None:
    """At the same moment, as far as there is one."""
    runner = pool.workers[worker].runner()
    assert runner is not None
    pool.workers[worker].process.send(signal.SIGKILL)
    runner.kill()
    pool.workers[worker].process.wait()


def cgroups_of_build(pid: int) -> list[Path]:
    """Those made for the build that the process belongs to; none where builds get none."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    names = {Path(line).name for line in lines if "/nix-build@" in line}
    return [path for name in names for path in Path("/sys/fs/cgroup").rglob(name)]


def test_agent_and_runner_are_killed_together(crowd: Crowd, tmp_path: Path, cost: Cost) -> None:
    pool = crowd.pool
    strays = tmp_path / "strays"
    before = (
        f"setsid sh -c 'echo $$ >> {strays}; exec sleep 3000' & while ! test -s {strays}; do sleep 0.1; done;"
    )
    under = in_mid_build(pool, "both", tmp_path, before)
    (stray,) = [int(pid) for pid in strays.read_text().split()]
    groups = cgroups_of_build(stray)
    cost.begin("agent and runner killed together")
    kill_agent_and_runner(pool, "host-both")
    pool.restart_worker("host-both")
    wait_until("a second start", lambda: under.counting.starts() == 2)
    cost.useful(again=1)
    # Nothing of the first ran any more when the second began.
    assert not is_alive(stray)
    assert not is_alive(under.counting.pids[0])
    under.finish_again(pool, "the process that ran the build died")
    wait_until("the end of its cgroups", lambda: not any(path.exists() for path in groups))
    pool.stop_worker("host-both")
    assert not any(path.parent.exists() for path in groups)
    assert not [pid for pid in map(int, strays.read_text().split()) if is_alive(pid)]


@pytest.mark.parametrize("step", ["stores.directory:DirectoryStore._install", "stores.registry:Registry.put"])
def test_an_agent_is_killed_while_it_stores_an_output(
    crowd: Crowd, tmp_path: Path, cost: Cost, step: str
) -> None:
    """The only copy has left the build's directory, and no row tells of it: the build does not run again."""
    pool = crowd.pool
    name = f"storing-{'row' if step.endswith('put') else 'rename'}"
    # An agent that evaluates stores the source, too: `making` does that.
    pool.start_worker(
        f"host-{name}", "--system-features", name, "--eval-max-concurrent", "0",
        environment=altered(die_at=f"gradient_worker.{step}"),
    )  # fmt: skip
    under = begin(pool, Counting(f"{name}-1.0", tmp_path, more={"features": [name]}))
    under.wait_for_log(pool, 30)
    under.counting.go()
    agent = pool.workers[f"host-{name}"].process
    wait_until("the end of the agent", lambda: agent.code is not None)
    cost.begin(f"agent killed while it stores an output, before its {name.removeprefix('storing-')}")
    pool.workers[f"host-{name}"].environment = {}
    pool.restart_worker(f"host-{name}")
    pool.ended(under.evaluation)
    cost.useful()
    under.finish(pool)
    pool.stop_worker(f"host-{name}")


def test_an_agent_finds_half_a_record_of_what_its_log_leaves_out(
    crowd: Crowd, tmp_path: Path, cost: Cost
) -> None:
    """As a full disk or a kill leaves it."""
    pool = crowd.pool
    under = in_mid_build(pool, "torn", tmp_path)
    under.wait_for_log(pool, 30)
    pool.workers["host-torn"].process.end(signal.SIGKILL)
    [build] = [one for one in (pool.workers["host-torn"].base_dir / "builds").iterdir() if one.name[0] != "."]
    (build / "log.gaps").write_bytes(b"\x93\x05\x07\xc4\x20abc")
    size = pool.log_size(under.job)
    cost.begin("agent killed while it wrote down what its log leaves out")
    pool.restart_worker("host-torn")
    under.wait_for_log(pool, size)
    cost.useful()
    under.finish(pool)
    pool.stop_worker("host-torn")


def test_two_agents_have_one_id(crowd: Crowd, tmp_path: Path, cost: Cost) -> None:
    pool = crowd.pool
    under = in_mid_build(pool, "one", tmp_path)
    copy = pool.directory / "host-two"
    copy.mkdir()
    for name in ("worker_id", "peers"):
        shutil.copy(pool.directory / "host-one" / name, copy / name)
    cost.begin("two agents with one id: the second one is refused, and let in once the first has gone")
    pool.start_worker("host-two", "--system-features", "one", register=False, wait=False)
    log = pool.directory / "host-two.log"
    wait_until(
        "the refusal", lambda: "stop it, or give this one a base directory of its own" in log.read_text()
    )
    size = pool.log_size(under.job)
    under.wait_for_log(pool, size)
    cost.useful()
    under.finish(pool)
    pool.stop_worker("host-one")
    wait_until("the second one's session", lambda: '"event": "connected"' in log.read_text())
    pool.stop_worker("host-two")


def test_a_build_kills_its_agent_each_time(crowd: Crowd, tmp_path: Path, cost: Cost) -> None:
    pool = crowd.pool
    victim = tmp_path / "victim"
    name = "host-poisoned"
    pool.start_worker(
        name, "--system-features", "poison",
        environment=altered(constants={"gradient_worker.timing:AGENT_DEATHS": AGENT_DEATHS}),
    )  # fmt: skip
    kill = f"pid=$(cat {victim}) || pid=; test -z $pid || kill -9 $pid || true"
    script = f"echo $$ >> {tmp_path}/starts; while :; do {kill}; sleep 0.1; done"
    evaluation = pool.submit(pool.tree(Build("poison-1.0", script, more={"features": ["poison"]})))
    pool.running(evaluation, "poison-1.0")
    cost.begin(f"a build kills its agent each time ({AGENT_DEATHS} deaths a try, two tries)")
    deaths = 0

    def ended_or_killed() -> bool:
        nonlocal deaths
        worker = pool.workers[name]
        # A service manager starts it again; it is killed once it has the build.
        if worker.process.code is not None:
            deaths += 1
            victim.unlink()
            pool.restart_worker(name)
            return False
        entry = by_name(pool.evaluation(evaluation))["poison-1.0"]
        connected = {one["name"]: one["state"] for one in pool.get("/workers")["workers"]}.get(name)
        if entry["stage"] == "Build" and connected == "connected":
            # Whole or not at all: what is read is killed.
            whole = victim.with_suffix(".new")
            whole.write_text(str(worker.process.pid))
            whole.chmod(0o644)
            whole.replace(victim)
        return entry["status"] == "Failed"

    wait_until("the end of a build that kills its agent", ended_or_killed, secs=120)
    cost.useful(again=1)
    entry = by_name(pool.evaluation(evaluation))["poison-1.0"]
    assert entry["error"] == f"{AGENT_DEATHS} agents of the worker died while they had it"
    assert entry["attempts"] == 2
    assert deaths == 2 * AGENT_DEATHS
    pids = [int(pid) for pid in (tmp_path / "starts").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]
    # Whoever comes next is served.
    victim.write_text("")
    after = pool.submit(pool.tree(Build("after-1.0", more={"features": ["poison"]})))
    assert pool.ended(after)["status"] == "Completed"
    pool.stop_worker(name)


# What became of a build, of its worker's signals: how often it started, and what the first try ended by.
# SIGKILL of the agent costs nothing where the next one comes; of the runner, its builds.
SIGNALS = {
    "SIGTERM": (1, None),
    "SIGUSR1": (1, None),
    "SIGINT": (1, None),
    "SIGINT twice": (2, "the worker is draining"),
}


def one_for_each_signal(pool: Pool, directory: Path) -> dict[str, Under]:
    """Builds that run, each at a worker of its own that bears its name."""
    countings: dict[str, Counting] = {}
    for signs in (*SIGNALS, "runner"):
        name = "".join(letter for letter in signs.lower() if letter.isalnum())
        place = directory / name
        place.mkdir()
        place.chmod(0o777)
        countings[signs] = Counting(name, place, more={"features": [name]})
        flags = ("--system-features", name, "--drain-timeout-secs", "30", "--eval-max-concurrent", "0")
        pool.start_worker(name, *flags, wait=False)
    pool.wait_connected(*(counting.name for counting in countings.values()))
    evaluation = pool.submit(pool.tree(*(counting.build for counting in countings.values())))
    unders = {}
    for signs, counting in countings.items():
        build = pool.running(evaluation, counting.name)
        unders[signs] = Under(counting, evaluation, f"build:{build['id']}")
        unders[signs].wait_for_log(pool, 30)
    return unders


def test_each_signal_is_no_worse_than_sigkill(crowd: Crowd, tmp_path: Path, cost: Cost) -> None:
    """All at once, each with a worker of its own. A drained agent ends what it has; else the next goes on."""
    pool = crowd.pool
    unders = one_for_each_signal(pool, tmp_path)
    agents = {signs: pool.workers[under.counting.name] for signs, under in unders.items()}
    cost.begin("SIGTERM, SIGUSR1, SIGINT once and twice to agents, SIGTERM to a runner, all at once")
    for signs, worker in agents.items():
        if signs == "runner":
            runner = worker.runner()
            assert runner is not None
            runner.terminate()
        else:
            worker.process.send(signal.Signals[signs.split()[0]])
    wait_until("a drain", lambda: "told to leave" in (pool.directory / "siginttwice.log").read_text())
    agents["SIGINT twice"].process.send(signal.SIGINT)
    for signs in ("SIGUSR1", "SIGINT"):
        assert agents[signs].process.code is None, "a drain lets builds end"
        unders[signs].counting.go()
    for signs in SIGNALS:
        assert agents[signs].process.wait() == 0, signs
        pool.restart_worker(agents[signs].name)
    for under in unders.values():
        under.counting.go()
    for signs, (starts, lost) in SIGNALS.items():
        if starts == 1:
            unders[signs].finish(pool)
        else:
            assert lost is not None
            unders[signs].finish_again(pool, lost)
    unders["runner"].finish_again(pool, "the process that ran the build died")
    cost.useful(again=2)
    for worker in agents.values():
        worker.process.send(signal.SIGTERM)
    for worker in agents.values():
        pool.stop_worker(worker.name)
