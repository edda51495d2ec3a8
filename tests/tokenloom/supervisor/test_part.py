"""One part: started, followed, started again, and ended with all that it started."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tokenloom.services.runtime.addresses import CHANGED_SUFFIX, draft_of
from tokenloom.supervisor import part as part_module
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part import SupervisedPart, describe_exit
from tokenloom.supervisor.part_spec import PartFailed, PartSpec
from tokenloom.supervisor.process import Process

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
MakeSpec = Callable[..., PartSpec]
Printed = list[tuple[str, str]]


@contextlib.asynccontextmanager
async def kept(part: SupervisedPart) -> AsyncIterator["asyncio.Task[None]"]:
    """The part while it is kept; killed at the end."""
    keeper = asyncio.create_task(part.keep())
    try:
        yield keeper
    finally:
        part.kill()
        await asyncio.wait([keeper])


async def serving_pid(part: SupervisedPart) -> int:
    async with asyncio.timeout(60):
        await part.serving.wait()
    assert part.state is not None
    return part.state.pid


async def test_a_part_is_serving_once_its_health_says_so(make_spec: MakeSpec, output: LineCopier) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part):
        pid = await serving_pid(part)
        assert os.getpgid(pid) == pid, "a process group of its own"
        assert psutil.Process(pid).ppid() == os.getpid()


async def test_a_killed_part_comes_back_at_once(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, eventually: Eventually
) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part):
        first = await serving_pid(part)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: not part.serving.is_set())
        assert await serving_pid(part) != first
    assert ("fake-0", "killed by SIGKILL; restarting in 0.1 s") in printed


async def test_a_part_that_has_run_for_long_comes_back_without_a_pause(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part):
        for stable, words in (
            (-1.0, "killed by SIGKILL; restarting"),
            (600.0, "killed by SIGKILL; restarting in 0.1 s"),
        ):
            monkeypatch.setattr(part_module, "STABLE_SECONDS", stable)
            os.kill(await serving_pid(part), signal.SIGKILL)
            await eventually(lambda: not part.serving.is_set())
            await serving_pid(part)
            assert ("fake-0", words) in printed


async def test_a_part_that_is_made_to_crash_comes_back(make_spec: MakeSpec, output: LineCopier) -> None:
    part = SupervisedPart(make_spec(), output)
    part.crash()  # before it runs there is nothing to kill
    async with kept(part):
        first = await serving_pid(part)
        part.crash()
        async with asyncio.timeout(60):
            await part.restarted(0)
        assert part.restarts == 1
        assert await serving_pid(part) != first


async def test_a_part_that_is_made_to_crash_does_not_serve_by_what_its_file_still_says(
    make_spec: MakeSpec, output: LineCopier
) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part):
        await serving_pid(part)
        notices = part.spec.state_file.with_suffix(CHANGED_SUFFIX)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.sendto(b"", str(notices))
        part.crash()
        while notices.exists():  # its end has not been noticed
            assert not part.serving.is_set()
            await asyncio.sleep(0)


async def test_a_state_that_was_half_written_is_removed(
    make_spec: MakeSpec, output: LineCopier, eventually: Eventually
) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part):
        pid = await serving_pid(part)
        draft = draft_of(part.spec.state_file, pid)
        draft.touch()  # as by a process that is killed at that moment
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not draft.exists())


async def test_only_the_first_process_has_the_first_flags(
    make_spec: MakeSpec, output: LineCopier, eventually: Eventually
) -> None:
    part = SupervisedPart(replace(make_spec(), first_flags=("--drain-timeout", "77")), output)
    async with kept(part):
        first = await serving_pid(part)
        assert "77" in psutil.Process(first).cmdline()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: not part.serving.is_set())
        assert "77" not in psutil.Process(await serving_pid(part)).cmdline()


async def test_a_part_that_drains_by_itself_has_a_successor_at_once(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, eventually: Eventually
) -> None:
    part = SupervisedPart(make_spec(behaviour="leave"), output)
    async with kept(part) as keeper:
        old = await serving_pid(part)
        os.kill(old, signal.SIGTERM)
        await eventually(lambda: part.state is not None and part.state.pid != old)
        new = await serving_pid(part)
        assert ("fake-0", "drains; starting its successor") in printed
        assert psutil.pid_exists(old)
        part.spec.state_file.with_name("finish").touch()
        await eventually(lambda: not psutil.pid_exists(old))
        assert part.spec.state_file.exists(), "it is the successor's"
        assert await serving_pid(part) == new
        part.stop()
        async with asyncio.timeout(60):
            await keeper
    assert part.restarts == 1


async def test_at_most_two_predecessors_drain(make_spec: MakeSpec, output: LineCopier, eventually: Eventually) -> None:
    part = SupervisedPart(make_spec(behaviour="leave"), output)
    pids = list[int]()
    async with kept(part) as keeper:
        for number in range(3):
            pids.append(await serving_pid(part))
            os.kill(pids[-1], signal.SIGTERM)
            if number < 2:
                await eventually(lambda: part.state is not None and part.state.pid not in pids)
        await eventually(lambda: not part.serving.is_set())
        assert part.restarts == 2
        part.kill()
        await keeper
    assert not any(map(psutil.pid_exists, pids))


async def test_stop_lets_the_part_drain(make_spec: MakeSpec, output: LineCopier, printed: Printed) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        await serving_pid(part)
        part.stop()
        async with asyncio.timeout(60):
            await keeper
    output.close()
    assert ("fake-0", "drained") in printed
    assert not part.serving.is_set()
    assert part.restarts == 0


async def test_a_part_that_is_stopped_twice_gets_one_signal(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[str] = []
    terminate = Process.terminate

    def noted(process: Process) -> None:
        signals.append("SIGTERM")
        terminate(process)

    monkeypatch.setattr(Process, "terminate", noted)
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        await serving_pid(part)
        part.stop()
        part.stop()
        async with asyncio.timeout(60):
            await keeper
    output.close()
    assert signals == ["SIGTERM"], "a second one would end it in the middle of its requests"
    assert ("fake-0", "drained") in printed


async def test_a_part_that_does_not_listen_to_sigterm_can_be_killed(make_spec: MakeSpec, output: LineCopier) -> None:
    part = SupervisedPart(make_spec(behaviour="deaf"), output)
    async with kept(part) as keeper:
        pid = await serving_pid(part)
        part.stop()
        assert not (await asyncio.wait([keeper], timeout=0.2))[0]
        part.kill()
        await keeper
        assert not psutil.pid_exists(pid)


async def test_wrong_settings_are_not_tried_again(make_spec: MakeSpec, output: LineCopier) -> None:
    part = SupervisedPart(make_spec(behaviour="usage"), output)
    async with kept(part) as keeper:
        with pytest.raises(PartFailed, match=r"fake-0 did not start \(exited with status 2\)"):
            await keeper
    assert part.restarts == 1


async def test_a_part_that_never_serves_is_given_up(
    make_spec: MakeSpec, output: LineCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.supervisor.part.START_ATTEMPTS", 2)
    part = SupervisedPart(make_spec(behaviour="crash"), output)
    async with kept(part) as keeper:
        with pytest.raises(PartFailed, match="status 1"):
            await keeper
    assert part.restarts == 2


async def test_what_a_dead_part_left_behind_is_ended(
    make_spec: MakeSpec, output: LineCopier, socket_dir: Path, eventually: Eventually
) -> None:
    part = SupervisedPart(make_spec(behaviour="child"), output)
    async with kept(part) as keeper:
        os.kill(await serving_pid(part), signal.SIGKILL)
        child = psutil.Process(int((socket_dir / "fake-0.child").read_text()))
        await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        part.kill()
        await keeper


async def test_a_stop_during_the_start_ends_it(make_spec: MakeSpec, output: LineCopier) -> None:
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        await asyncio.sleep(0)
        part.stop()
        async with asyncio.timeout(60):
            await keeper
    assert part.state is None


class ScarceDescriptors:
    """Lets the process run out of descriptors at chosen calls of a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, failures: int) -> None:
        self.left = 0
        self._failures = failures
        self._real = getattr(owner, name)
        monkeypatch.setattr(owner, name, self._call)

    def exhaust(self) -> None:
        self.left = self._failures

    def _call(self, *arguments: object, **options: object) -> object:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._real(*arguments, **options)


async def test_a_restart_without_descriptors_is_tried_again(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    scarce = ScarceDescriptors(monkeypatch, output, "open", failures=4)
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        first = await serving_pid(part)
        scarce.exhaust()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: not scarce.left or keeper.done())
        assert not keeper.done()
        assert await serving_pid(part) != first
    assert ("fake-0", "could not be started (Too many open files); trying again in 0.2 s") in printed


async def test_a_part_whose_health_cannot_be_read_runs_on(
    make_spec: MakeSpec, output: LineCopier, printed: Printed, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A state file or a socket that fails is a fault of ours, not of the part."""
    scarce = ScarceDescriptors(monkeypatch, part_module, "_notices", failures=2)
    scarce.exhaust()
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        await eventually(lambda: not scarce.left or keeper.done())
        assert not keeper.done()
        await serving_pid(part)
    assert part.restarts == 0
    assert ("fake-0", "its health cannot be read (Too many open files); trying again in 0.1 s") in printed


async def test_a_part_that_can_never_be_started_is_given_up(
    make_spec: MakeSpec, output: LineCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScarceDescriptors(monkeypatch, output, "open", failures=100).exhaust()
    part = SupervisedPart(make_spec(), output)
    async with kept(part) as keeper:
        with pytest.raises(PartFailed, match=r"fake-0 did not start \(could not be started \(Too many open files\)\)"):
            await keeper
    assert part.restarts == 3


def test_exits_are_described() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-35) == "killed by signal 35", "signals for real-time programs have no names"
    assert describe_exit(-64) == "killed by SIGRTMAX"
    assert describe_exit(3) == "exited with status 3"
