"""The lifecycle, NOT_SERVING, SERVING, draining, stopped, and what ends it early."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace

from tests.ready_channel import ready_channel
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host, StateFile
from tokenloom.services.runtime.host.listener import bind
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "tokenloom.v1.Coordinator"


class Example(coordinator_pb2_grpc.CoordinatorServicer):
    """A service whose steps a test drives."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.draining = asyncio.Event()
        self.host: Host

    async def start(self, host: Host) -> None:
        self.host = host
        self.steps.append("start")
        await self.may_start.wait()
        host.add_servicer(coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self)

    async def drain(self) -> None:
        self.steps.append("drain")
        self.draining.set()
        await self.may_end.wait()

    async def stop(self) -> None:
        self.steps.append("stop")

    async def Pick(self, request: coordinator_pb2.PickRequest, context: object) -> coordinator_pb2.PickResponse:
        return coordinator_pb2.PickResponse(whole_request=True)

    async def Watch(
        self, request: coordinator_pb2.WatchRequest, context: object
    ) -> AsyncIterator[coordinator_pb2.Snapshot]:
        yield coordinator_pb2.Snapshot(revision=1)
        await asyncio.Event().wait()


@pytest.fixture
def settings(socket_dir: Path) -> ServiceSettings:
    return ServiceSettings.of(listen=f"unix:{socket_dir}/s", state_file=socket_dir / "state.json", drain_timeout=60)


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True)
    return response.status


async def test_serving_from_ready_to_drain(settings: ServiceSettings) -> None:
    service = Example()
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        assert await health(channel) == await health(channel, NAME) == SERVING
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        assert (await stub.Pick(coordinator_pb2.PickRequest())).whole_request
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        await host.health.set_serving(False)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
    assert service.steps == ["start", "drain", "stop"]


async def test_not_serving_while_starting(settings: ServiceSettings) -> None:
    service = Example()
    service.may_start.clear()

    async def life() -> None:
        async with running(service, settings):
            pass

    async with open_channel(settings.listen) as channel:
        task = asyncio.create_task(life())
        assert await health(channel) == NOT_SERVING
        assert await health(channel, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator_pb2_grpc.CoordinatorStub(channel).Pick(coordinator_pb2.PickRequest())
        assert isinstance(wire_errors.from_rpc(caught.value), errors.Unavailable)
        assert service.host.address == settings.listen  # a service may tell it while it starts
        service.may_start.set()
        await task


async def test_draining_serves_what_is_live(settings: ServiceSettings) -> None:
    service = Example()
    service.may_end.clear()
    leave = asyncio.Event()

    async def life() -> None:
        async with running(service, settings):
            await leave.wait()

    async with open_channel(settings.listen) as channel:
        task = asyncio.create_task(life())
        watch = coordinator_pb2_grpc.CoordinatorStub(channel).Watch(coordinator_pb2.WatchRequest(), wait_for_ready=True)
        assert (await watch.read()).revision == 1
        told = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await told.read()).status == SERVING
        leave.set()
        assert (await told.read()).status == NOT_SERVING
        assert (await coordinator_pb2_grpc.CoordinatorStub(channel).Pick(coordinator_pb2.PickRequest())).whole_request
        assert not task.done()
        told.cancel()
        service.may_end.set()
        await task
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()


async def test_the_drain_has_a_limit(settings: ServiceSettings) -> None:
    service = Example()
    service.may_end.clear()
    async with asyncio.timeout(30), running(service, replace(settings, drain_timeout=0.01)):
        pass
    assert service.steps == ["start", "drain", "stop"]


async def test_a_failure_ends_the_drain(settings: ServiceSettings) -> None:
    service = Example()
    service.may_end.clear()

    async def fail_in_drain() -> None:
        await service.draining.wait()
        raise RuntimeError("core died")

    with pytest.raises(RuntimeError, match="core died"):
        async with asyncio.timeout(30), running(service, settings) as host:
            host.spawn(fail_in_drain(), name="fails")
    assert service.steps == ["start", "drain", "stop"]


async def test_the_state_file_is_there_while_it_runs(settings: ServiceSettings) -> None:
    async with running(Example(), settings) as host:
        host.publish(http="127.0.0.1:8000")
        assert settings.state_file is not None
        state = json.loads(settings.state_file.read_text())
        assert state["service"] == "service"
        assert state["instance_id"] == "service-0"
        assert state["address"] == state["health"] == settings.listen
        assert state["metrics"] == host.metrics_address
        assert state["http"] == "127.0.0.1:8000"
        assert isinstance(state["pid"], int)
    assert not settings.state_file.exists()
    host.fall_backs.begin("old_view", "found while it ends")
    assert not settings.state_file.exists()


async def test_a_process_that_has_left_does_not_write_over_its_successor(settings: ServiceSettings) -> None:
    assert settings.state_file is not None
    left, successor = StateFile(settings.state_file), StateFile(settings.state_file)
    left.publish(pid=1, leaving=True)
    successor.publish(pid=2, serving=True)
    left.publish(fall_backs=["a fall-back that begins while it drains"])
    left.remove()
    assert json.loads(settings.state_file.read_text()) == {"pid": 2, "serving": True}


async def test_a_state_file_that_cannot_be_written_for_long_does_not_fill_the_log(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, delays, attempts = asyncio.get_running_loop(), list[float](), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def soon(delay: float, callback: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        delays.append(delay)
        attempts.append(call_later(0 if len(delays) < 8 else delay, callback, *arguments))
        return attempts[-1]

    async with running(Example(), settings) as host:
        assert settings.state_file is not None
        monkeypatch.setattr(host, "_state", StateFile(settings.state_file.parent / "none" / "state.json"))
        monkeypatch.setattr(loop, "call_later", soon)
        await host.health.set_healthy(False)
        while len(delays) < 8:  # noqa: ASYNC110 - timers have no event
            await asyncio.sleep(0)
        assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
        await host.health.set_healthy(True)
        assert delays[8:] == [1], "what is new is tried soon"
        assert [each.cancelled() for each in attempts[7:]] == [True, False], "one row of attempts is enough"
    assert "cannot write" in caplog.text


async def test_many_fall_backs_are_written_once(settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.state_file is not None
    writes: list[int] = []
    async with running(Example(), settings) as host:
        publish = host.publish
        monkeypatch.setattr(host, "publish", lambda **fields: (writes.append(len(fields)), publish(**fields)))
        for number in range(1000):
            host.fall_backs.begin("no_pair", "as after a wrong flag", f"engine-{number}")
        await asyncio.to_thread(host.fall_backs.begin, "old_view", "in another thread")
        await asyncio.sleep(0)
        assert len(json.loads(settings.state_file.read_text())["fall_backs"]) == 1001
    assert len(writes) <= 2


async def test_a_fall_back_that_the_state_file_cannot_show_fails_nobody(
    settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    assert settings.state_file is not None
    folder = settings.state_file.parent / "removed"
    folder.mkdir()
    settings = replace(settings, state_file=folder / "state.json")
    async with running(Example(), settings) as host:
        shutil.rmtree(folder)
        host.fall_backs.begin("old_view", "as on a full disk")
        await asyncio.sleep(0)
        assert "cannot write" in caplog.text
        folder.mkdir()
        host.publish(role="both")
        shown = json.loads((folder / "state.json").read_text())["fall_backs"]
        assert [each["detail"] for each in shown] == ["as on a full disk"]


async def test_tcp_gets_a_port() -> None:
    settings = ServiceSettings.of(listen="127.0.0.1:0", metrics_listen="")
    async with running(Example(), settings) as host:
        assert host.address.startswith("127.0.0.1:")
        assert not host.address.endswith(":0")
        assert host.metrics_address == ""
        taken = ServiceSettings.of(listen=host.address, metrics_listen="")
        with pytest.raises(errors.Unavailable, match="cannot bind"):
            async with running(Example(), taken):
                pass


@pytest.mark.parametrize("field", ["listen", "metrics_listen"])
async def test_open_ports_are_refused(field: str) -> None:
    settings = ServiceSettings.of(**{"metrics_listen": "", field: "0.0.0.0:0"})
    with pytest.raises(errors.InvalidArgument, match="insecure"):
        async with running(Example(), settings):
            pass


async def test_the_unix_socket_of_a_service_that_runs_is_not_taken(settings: ServiceSettings) -> None:
    """gRPC would take it without a word, and the end of either service would remove it."""
    async with running(Example(), settings) as host:
        address = host.address
        with pytest.raises(errors.Unavailable, match="a process listens there"):
            async with running(Example(), replace(settings, state_file=None)):
                pass
        with pytest.raises(errors.Unavailable, match="a process listens there"):
            bind(grpc.aio.server(), address, None, insecure=False)
        async with open_channel(address) as channel:
            assert await health(channel) == SERVING


async def test_a_failed_start_releases_everything(settings: ServiceSettings) -> None:
    class Failing(Example):
        async def start(self, host: Host) -> None:
            host.spawn(asyncio.Event().wait(), name="endless")
            raise errors.NotFound("model 'x': no such directory")

    service = Failing()
    with pytest.raises(errors.NotFound):
        async with running(service, settings):
            pass
    assert service.steps == ["stop"]
    assert len(asyncio.all_tasks()) == 1


async def test_a_failed_task_fails_the_host(settings: ServiceSettings) -> None:
    async def fail() -> None:
        raise RuntimeError("core died")

    service = Example()
    async with running(service, settings) as host:
        host.spawn(fail(), name="fails")
        assert str(await host.failure.take()) == "core died"
    assert service.steps == ["start", "stop"]  # nothing left to drain for

    with pytest.raises(RuntimeError, match="core died"):
        async with running(Example(), settings) as host:
            await asyncio.wait([host.spawn(fail(), name="unseen")])


async def test_a_task_that_fails_meanwhile_ends_the_start(settings: ServiceSettings) -> None:
    service = Example()
    service.may_start.clear()
    starting = asyncio.create_task(running(service, settings).__aenter__())
    while "start" not in service.steps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    service.host.failed(errors.Unavailable("the core died"))
    with pytest.raises(errors.Unavailable, match="the core died"):
        await starting
    assert service.steps == ["start", "stop"]


async def test_a_traceback_is_for_bugs_only(settings: ServiceSettings, caplog: pytest.LogCaptureFixture) -> None:
    for error, is_bug in ((errors.Unavailable("the core died"), False), (RuntimeError("a bug"), True)):
        caplog.clear()
        async with running(Example(), settings) as host:
            host.failed(error)
            await host.failure.take()
        (record,) = (record for record in caplog.records if record.levelname == "ERROR")
        assert bool(record.exc_info) is is_bug


async def test_reflection_lists_the_services(settings: ServiceSettings) -> None:
    async with running(Example(), settings) as host, ready_channel(host.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
    names = {service.name for service in response.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


PROCESS = """
import asyncio, sys
from tokenloom.services.runtime.host.service import main
from tokenloom.services.runtime.host.service_settings import ServiceSettings

class Stubborn:
    def __init__(self, settings): pass
    async def start(self, host):
        print("starting", flush=True)
        if "bug" in settings_of(host): 1 / 0
        if "switch" in settings_of(host): print(sys.getswitchinterval(), flush=True)
        if "start" in settings_of(host): await asyncio.Event().wait()
        self.host = host
        host.spawn(self.tell(), name="tell")
    async def tell(self):
        while not self.host.health.serving: await asyncio.sleep(0.001)
        print("serving", flush=True)
        if "fail" in settings_of(self.host): raise RuntimeError("broken")
    async def drain(self):
        print("draining", flush=True)
        if "drain" in settings_of(self.host): await asyncio.Event().wait()
    async def stop(self): print("stopped", flush=True)

def settings_of(host): return host.settings.instance_id

sys.exit(main(Stubborn, ServiceSettings, "service"))
"""


class Process:
    """Runs a service in a process of its own and reads what it prints."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *argv: str) -> "Process":
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, *argv, stdout=pipe, stderr=pipe))

    async def prints(self, line: str) -> None:
        assert self._process.stdout is not None
        assert (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().strip() == line

    async def end(self) -> tuple[int, str]:
        _, stderr = await asyncio.wait_for(self._process.communicate(), 60)
        assert self._process.returncode is not None
        return self._process.returncode, stderr.decode()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(number: int) -> None:
    process = await Process.start()
    for line in ("starting", "serving"):
        await process.prints(line)
    process.signal(number)
    for line in ("draining", "stopped"):
        await process.prints(line)
    assert (await process.end())[0] == 0


async def test_threads_that_compute_soon_let_the_event_loop_go_on() -> None:
    process = await Process.start("--instance-id", "switches")
    for line in ("starting", "0.001", "serving"):
        await process.prints(line)
    process.signal(signal.SIGTERM)
    assert (await process.end())[0] == 0


async def test_the_second_signal_kills() -> None:
    process = await Process.start("--instance-id", "hangs-in-drain")
    for line in ("starting", "serving"):
        await process.prints(line)
    process.signal(signal.SIGINT)
    await process.prints("draining")
    process.signal(signal.SIGINT)
    assert (await process.end())[0] == -signal.SIGINT


async def test_a_signal_while_starting_stops() -> None:
    process = await Process.start("--instance-id", "hangs-in-start")
    await process.prints("starting")
    process.signal(signal.SIGTERM)
    await process.prints("stopped")
    assert (await process.end())[0] == 0


async def test_a_failure_is_status_1() -> None:
    process = await Process.start("--instance-id", "fails")
    for line in ("starting", "serving", "stopped"):
        await process.prints(line)
    status, log = await process.end()
    assert status == 1
    assert "broken" in log


async def test_a_bug_while_starting_is_logged() -> None:
    process = await Process.start("--instance-id", "bug-in-start", "--log-format", "json")
    status, log = await process.end()
    assert status == 1
    (line,) = log.splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exception"]


async def test_what_an_operator_did_wrong_is_one_line() -> None:
    process = await Process.start("--listen", "0.0.0.0:0")
    status, log = await process.end()
    assert status == 2, "as of any flag that cannot be right: the supervisor need not try again"
    assert "--insecure" in log
    assert "Traceback" not in log


async def test_a_service_goes_on_when_its_state_file_cannot_be_written_any_more(
    settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk is full, or a cleaner of temporary folders was there."""
    assert settings.state_file is not None
    folder = settings.state_file.parent / "state"
    folder.mkdir()
    settings = replace(settings, state_file=folder / "state.json")
    async with running(Example(), settings) as host:
        (folder / "state.json").unlink()
        folder.rmdir()
        host.publish(leaving=True)
        assert f"cannot write {folder}" in caplog.text
        folder.mkdir()
        host.publish(role="decode")
        state = json.loads((folder / "state.json").read_text())
        assert (state["leaving"], state["role"], state["address"]) == (True, "decode", host.address)


async def test_the_state_file_says_whether_it_serves_as_soon_as_it_can_be_written(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.services.runtime.host.host._FIRST_RETRY", 0.01)
    assert settings.state_file is not None
    folder = settings.state_file.parent / "state"
    folder.mkdir()
    settings = replace(settings, state_file=folder / "state.json")
    async with running(Example(), settings) as host:
        assert json.loads((folder / "state.json").read_text())["serving"] is True
        (folder / "state.json").unlink()
        folder.rmdir()
        await host.health.set_healthy(False)
        folder.mkdir()
        async with asyncio.timeout(30):
            while not (folder / "state.json").exists():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        assert json.loads((folder / "state.json").read_text())["serving"] is False


async def test_a_state_file_that_cannot_be_written_is_one_line() -> None:
    process = await Process.start("--state-file", "/nowhere/state.json")
    status, log = await process.end()
    assert status == 1
    assert "state_file" in log
    assert "Traceback" not in log
