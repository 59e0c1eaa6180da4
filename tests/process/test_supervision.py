"""Services that end unasked: restarts, messages, and errors for callers instead."""

import asyncio
import errno
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.errors import PeerFailed, StartupError
from paceline.process import launcher
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import Addresses, running_cluster
from paceline.process.service_process import STOP_SLACK_S, STOP_TIMEOUT_S, Endpoint, ServiceProcess
from paceline.process.supervision import keep_running
from tests.fakes.fake_time import FakeTime

pytestmark = pytest.mark.review

KILLED = "ended by signal 9"


class FakeService:
    """Ends when told to; starts as often as `start_count` allows."""

    def __init__(self, module: str = "target_service", flags: Sequence[str] = ()) -> None:
        self.name = module.removesuffix("_service")
        self.start_count: int | None = None
        self.starts = 0
        self.stopped = False
        self.stop_timeout_s = 0.0
        self.starting = asyncio.Event()
        self.can_start = asyncio.Event()
        self.can_start.set()
        self._ends: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> Endpoint:
        self.starts += 1
        self.starting.set()
        await self.can_start.wait()
        if self.start_count is not None and self.starts > self.start_count:
            self._ends.put_nowait("ended with status 1")
            raise StartupError("it ended before it listened")
        return Endpoint(f"{self.name}:1")

    async def ended(self) -> str:
        return await self._ends.get()

    def end(self) -> None:
        self._ends.put_nowait(KILLED)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        self.stopped, self.stop_timeout_s = True, timeout_s


async def test_a_service_that_ends_again_and_again_is_started_after_pauses_that_double() -> None:
    """Review G2: nothing was started again."""
    time, service, words = FakeTime(), FakeService(), list[tuple[float, str]]()

    def tell(text: str) -> None:
        words.append((time.now_s, text))
        if text == "target is back":
            if service.starts == 8:
                raise StopIteration
            service.end()

    service.end()
    with pytest.raises(RuntimeError):  # of the StopIteration
        await time.run(keep_running(service, tell, time.clock, time.sleep))
    restarts = [(at_s, text) for at_s, text in words if text != "target is back"]
    assert [at_s for at_s, _ in restarts] == [0, 0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5]
    assert restarts[0][1] == "target ended by signal 9; starting it again (1st time)"
    assert restarts[1][1] == "target ended by signal 9; starting it again in 0.5 s (2nd time)"
    assert restarts[7][1] == "target ended by signal 9; starting it again in 30 s (8th time)"


async def test_a_service_that_was_steady_for_long_is_started_again_at_once() -> None:
    time, service, pauses_s = FakeTime(), FakeService(), list[float]()

    async def sleep(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await time.sleep(delay_s)

    async def end_each_minute() -> None:
        for _ in range(4):
            service.end()
            await time.sleep(61)

    keeping = asyncio.create_task(keep_running(service, lambda text: None, time.clock, sleep))
    await time.run(end_each_minute())
    keeping.cancel()
    assert pauses_s == [0, 0, 0, 0]


async def test_a_service_that_does_not_start_any_more_is_given_up_with_words() -> None:
    time, service = FakeTime(), FakeService()
    service.start_count = 0
    service.end()
    with pytest.raises(StartupError, match="target ended with status 1: 5 starts in a row were of no use; see above"):
        await time.run(keep_running(service, lambda text: None, time.clock, time.sleep))
    assert service.starts == 5
    assert time.now_s == 0.5 + 1 + 2 + 4


async def test_a_service_in_whose_place_others_serve_is_given_up_only_with_them() -> None:
    """Coordinators of one port that served were ended with the one that could not start again."""
    time, service, words = FakeTime(), FakeService(), list[str]()
    service.start_count = 0
    service.end()
    keeping = keep_running(service, words.append, time.clock, time.sleep, others_serve=lambda: service.starts < 7)
    with pytest.raises(StartupError, match="target ended with status 1: 7 starts in a row were of no use; see above"):
        await time.run(keeping)
    assert time.now_s == 0.5 + 1 + 2 + 4 + 8 + 16
    serving = "5 starts in a row were of no use, and the others serve without it; starting it again in 8 s (6th time)"
    assert words[5] == f"target ended with status 1: {serving}"


async def test_a_service_in_whose_place_others_serve_is_started_again_for_however_long() -> None:
    """After eight hours its pause was too large for a float, and that error ended those that served."""
    time, service = FakeTime(), FakeService()
    service.start_count = 0
    service.end()
    keeping = keep_running(
        service, lambda text: None, time.clock, time.sleep, others_serve=lambda: service.starts < 1100
    )
    with pytest.raises(StartupError, match="1100 starts in a row were of no use"):
        await time.run(keeping)


class FakeCluster:
    """The services of `running_cluster` by name, and the messages about them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.services: dict[str, FakeService] = {}
        self.words: list[str] = []
        self.told = asyncio.Event()
        monkeypatch.setattr(launcher, "ServiceProcess", self._make)

    def _make(self, module: str, flags: Sequence[str]) -> FakeService:
        service = FakeService(module, flags)
        self.services[service.name] = service
        return service

    def tell(self, text: str) -> None:
        self.words.append(text)
        if text.endswith(" is back"):
            self.told.set()

    @asynccontextmanager
    async def running(self, *, supervised: bool) -> AsyncIterator[Addresses]:
        async with running_cluster(ClusterOptions(), self.tell if supervised else None) as addresses:
            yield addresses

    @property
    def all_stopped(self) -> bool:
        return all(one.stopped for one in self.services.values())


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


ROLES = ("target", "draft", "coordinator")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_url_of_a_gateway_is_one_that_it_answers_at(
    scheme: str, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`paceline up` said http of a gateway that variables gave a certificate."""
    if scheme == "https":
        monkeypatch.setenv("PACELINE_GATEWAY_TLS_CERTIFICATE", "certificate.pem")
        monkeypatch.setenv("PACELINE_GATEWAY_TLS_KEY", "key.pem")
    async with running_cluster(ClusterOptions(gateway_port=0)) as addresses:
        assert addresses.gateway_url == f"{scheme}://paceline.gateway:1"
    assert cluster.all_stopped


@pytest.mark.parametrize("role", ROLES)
async def test_each_service_of_a_supervised_cluster_is_started_again(cluster: FakeCluster, role: str) -> None:
    async with cluster.running(supervised=True) as addresses:
        assert addresses.target == "target:1"
        cluster.services[role].end()
        await cluster.told.wait()
        assert {name: one.starts for name, one in cluster.services.items()} == dict.fromkeys(ROLES, 1) | {role: 2}
    assert cluster.words == [f"{role} ended by signal 9; starting it again (1st time)", f"{role} is back"]
    assert cluster.all_stopped


@pytest.mark.parametrize("role", ROLES)
async def test_what_is_measured_ends_loudly_with_any_of_its_services(cluster: FakeCluster, role: str) -> None:
    """Review G2: a bench continued beside a dead service, or waited for ever."""
    with pytest.raises(PeerFailed, match=f"{role} ended by signal 9 while it was in use"):
        async with cluster.running(supervised=False):
            cluster.services[role].end()
            await asyncio.Event().wait()
    assert cluster.all_stopped


async def test_giving_a_service_up_ends_the_cluster_in_order(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.process.supervision.MOST_STARTS", 1)
    with pytest.raises(StartupError, match="draft ended with status 1: 1 starts in a row"):
        async with cluster.running(supervised=True):
            cluster.services["draft"].start_count = 1
            cluster.services["draft"].end()
            await asyncio.Event().wait()
    assert cluster.all_stopped


async def test_an_error_of_the_block_comes_out_as_it_is_and_stops_everything(cluster: FakeCluster) -> None:
    with pytest.raises(ValueError, match="its own"):
        async with cluster.running(supervised=True):
            raise ValueError("its own")
    assert cluster.all_stopped


async def test_an_interruption_while_a_service_starts_again_stops_everything(cluster: FakeCluster) -> None:
    async def use() -> None:
        async with cluster.running(supervised=True):
            target = cluster.services["target"]
            target.starting.clear()
            target.can_start.clear()
            target.end()
            await asyncio.Event().wait()

    using = asyncio.create_task(use())
    while "target" not in cluster.services or cluster.services["target"].starts < 2:
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert cluster.all_stopped


async def test_each_service_has_its_own_grace_until_it_is_killed(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was killed after 15 s, whatever its grace, and the requests that ran were cut off."""
    graces_s = dict(zip(ROLES, (20, 30, 40), strict=True))
    for role, grace_s in graces_s.items():
        monkeypatch.setenv(f"PACELINE_{role.upper()}_SHUTDOWN_GRACE_S", str(grace_s))
    async with cluster.running(supervised=True):
        pass
    for role, grace_s in graces_s.items():
        # A coordinator of several processes kills those that do not end in time, and has to be there then.
        assert cluster.services[role].stop_timeout_s > grace_s + STOP_SLACK_S


CHATTY = """
import sys
print("loading, not yet listening on anything", flush=True)
print("{announced}", flush=True)
print("said later", flush=True)
sys.stdin.read()
print("said last", flush=True)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which `python -m` takes modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def test_a_service_may_say_other_things_on_stdout_and_they_are_passed_on(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Review C15: its start waited for ever."""
    (modules / "chatty.py").write_text(CHATTY.format(announced="chatty listening on 127.0.0.1:7"))
    service = ServiceProcess("chatty", [])
    assert await service.start() == Endpoint("127.0.0.1:7")
    printed = ""
    while "said later" not in printed:
        await asyncio.sleep(0.01)
        printed += capsys.readouterr().err
    assert "loading, not yet" in printed
    await service.stop()
    assert await service.ended() == "ended by signal 15"


@pytest.mark.parametrize(("ports", "told"), [((8, 9), ["--metrics-port 8"]), ((8, 10), []), ((), [])])
async def test_a_restart_is_told_metrics_ports_that_the_first_one_tells(
    ports: Sequence[int], told: list[str], modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of free ports that do not follow each other the second one's place was another's after a restart."""
    urls = ", ".join(f"http://127.0.0.1:{port}/metrics" for port in ports)
    listening = "chatty listening on 127.0.0.1:7" + (f", metrics on {urls}" if urls else "")
    (modules / "chatty.py").write_text("import sys\nprint(*sys.argv)\n" + CHATTY.format(announced=listening))
    service = ServiceProcess("chatty", [])
    for _ in range(2):
        await service.start()
        await service.stop()
        await service.ended()
    assert re.findall(r"--metrics-port \d+", capsys.readouterr().err) == told


async def test_a_folder_for_spans_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StartupError, match=f"--trace-dir {wrong} cannot be made"):
            async with running_cluster(ClusterOptions(trace_dir=str(wrong))):
                pass


TALKATIVE = """
print("x" * 300_000, "chatty listening on nothing", end="", flush=True)
print()
print("chatty listening on 127.0.0.1:7", flush=True)
print("é" * 500_000, end="", flush=True)
"""


class Closed:
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize(
    ("listening", "called"),
    [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("10.0.0.1:7", "10.0.0.1:7")],
)
async def test_a_service_that_listens_everywhere_is_called_on_this_machine(
    modules: Path, listening: str, called: str
) -> None:
    """The coordinator was told to call 0.0.0.0, which is not loopback, in plaintext; a variable may set this host."""
    (modules / "chatty.py").write_text(CHATTY.format(announced=f"chatty listening on {listening}"))
    service = ServiceProcess("chatty", [])
    assert (await service.start()).address == called
    await service.stop()


async def test_what_a_service_prints_stops_it_at_no_length(modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading ended at 64 KiB without an end of line, and the service waited for ever."""
    (modules / "chatty.py").write_text(TALKATIVE)
    service = ServiceProcess("chatty", [])
    assert await service.start() == Endpoint("127.0.0.1:7")
    printed = ""
    while printed.count("é") < 500_000:
        await asyncio.sleep(0.01)
        printed += capsys.readouterr().err
    assert printed.count("x") == 300_000
    assert await service.ended() == "ended with status 0"


async def test_a_service_runs_on_when_what_it_prints_can_go_nowhere(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (modules / "chatty.py").write_text(TALKATIVE)
    monkeypatch.setattr(sys, "stderr", Closed())
    service = ServiceProcess("chatty", [])
    assert await service.start() == Endpoint("127.0.0.1:7")
    assert await service.ended() == "ended with status 0"


@pytest.mark.parametrize(
    "error", [OSError(errno.EAGAIN, "Resource temporarily unavailable"), RuntimeError("can't start new thread")]
)
async def test_a_machine_without_room_for_a_process_is_tried_again_and_told(
    error: Exception, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the command, and with it every other service."""
    (modules / "chatty.py").write_text(CHATTY.format(announced="chatty listening on 127.0.0.1:7"))
    service, time, words = ServiceProcess("chatty", []), FakeTime(), list[str]()
    await service.start()
    await service.kill()

    async def no_room(*_: object, **__: object) -> asyncio.subprocess.Process:
        raise error

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    with pytest.raises(StartupError, match="chatty ended by signal 9: 5 starts in a row were of no use"):
        await time.run(keep_running(service, words.append, time.clock, time.sleep))
    why = f"chatty cannot be started: {error.args[-1]}; leave memory, processes and open files of this machine for it"
    assert words.count(why) == 5
    await service.stop()


async def test_a_start_that_is_given_up_leaves_no_process(modules: Path) -> None:
    (modules / "chatty.py").write_text(CHATTY.format(announced="still loading"))
    service = ServiceProcess("chatty", [])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(service.start(), 0.2)
    await service.stop()
    assert (await service.ended()).startswith("ended by signal")


async def test_a_service_that_closes_its_stdout_without_listening_has_not_started(modules: Path) -> None:
    (modules / "mute.py").write_text("import os, sys; os.close(1); sys.stdin.read()")
    with pytest.raises(StartupError, match="mute ended by signal 9 before it listened"):
        await ServiceProcess("mute", []).start()
