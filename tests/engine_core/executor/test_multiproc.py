"""Tests workers in processes of their own: what they compute, and what happens when one ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest
import zmq

from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.data.test_embedding_rows import expected, make_mixed, make_wide
from tests.engine_core.helpers import finish, make_config, make_request, tokens_of
from tests.engine_core.invariants import check_idle
from tests.engine_core.processes import collect, has_ended, wait_until
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig, ParallelConfig
from tokenloom.engine_core.data.errors import (
    EngineDeadError,
    ExecutorFailedError,
    RanksDifferError,
    WeightsDamagedError,
    WorkerLostError,
)
from tokenloom.engine_core.data.kv_events import AllBlocksCleared
from tokenloom.engine_core.executor import multiproc, worker_launch
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.executor.worker_launch import WorkerErrorKind, WorkerProcess, WorkerReply
from tokenloom.engine_core.fake_workers.hash_worker import DEFAULT_VOCAB_SIZE, expected_tokens
from tokenloom.engine_core.wire.frames import Decoder, encode
from tokenloom.services.engine.core.workers import WORKER_COMMAND

FAILING_WORKER = """
import argparse, os, sys
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output):
        raise RuntimeError("broken")

parser = argparse.ArgumentParser()
parser.add_argument("--address")
sys.stderr = open(os.devnull, "w")
os._exit(run_worker(parser.parse_known_args()[0].address, FailingWorker))
"""

REFUSING_WORKER = """
import argparse
from tokenloom.engine_core.executor.worker_process import run_worker

def refuse(config):
    raise ValueError("dtype is not supported")

parser = argparse.ArgumentParser()
parser.add_argument("--address")
raise SystemExit(run_worker(parser.parse_known_args()[0].address, refuse))
"""

DIVIDING_WORKER = """
import argparse
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class DividingWorker(HashWorker):
    def __init__(self, config):
        super().__init__(config)
        self.num_engines = config.cache.engines_on_host

    def determine_available_memory(self):
        return 1200 // self.num_engines

parser = argparse.ArgumentParser()
parser.add_argument("--address")
raise SystemExit(run_worker(parser.parse_known_args()[0].address, DividingWorker))
"""

RELOADING_WORKER = """
import argparse
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class ReloadingWorker(HashWorker):
    path = ""

    def reload_weights(self, path: str) -> None:
        self.path = path

    def resident_bytes(self) -> int:
        return len(self.path)

parser = argparse.ArgumentParser()
parser.add_argument("--address")
raise SystemExit(run_worker(parser.parse_known_args()[0].address, ReloadingWorker))
"""

DIFFERING_WORKER = """
import argparse
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class DifferingWorker(HashWorker):
    def __init__(self, config):
        super().__init__(config)
        self.rank = config.parallel.rank

    def check_weights(self, path: str) -> None:
        if path == "/refused/by/all" or self.rank == 1:
            raise ValueError(f"{path}: No such file or directory")

    def reload_weights(self, path: str) -> None:
        if self.rank == 1:
            raise OSError("the disk failed")

    def resident_bytes(self) -> int:
        return 7

parser = argparse.ArgumentParser()
parser.add_argument("--address")
raise SystemExit(run_worker(parser.parse_known_args()[0].address, DifferingWorker))
"""

WAITING_WORKER = """
import argparse, threading
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class WaitingWorker(HashWorker):
    def __init__(self, config):
        super().__init__(config)
        self.rank = config.parallel.rank

    def load_model(self):
        if self.rank == 1:
            raise ValueError("the file is broken")
        threading.Event().wait()  # as in an exchange of tensors with the other rank

parser = argparse.ArgumentParser()
parser.add_argument("--address")
raise SystemExit(run_worker(parser.parse_known_args()[0].address, WaitingWorker))
"""

RESET_WORKER = """
import argparse, os, signal, socket, sys, threading
from tokenloom.engine_core.executor.worker_process import run_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

class ResetWorker(HashWorker):
    def __init__(self, config):
        super().__init__(config)
        self.rank, self.exchange = config.parallel.rank, socket.socket(socket.AF_UNIX)
        if self.rank == 1:
            self.exchange.bind(__file__ + ".socket")
            self.exchange.listen()

    def execute_model(self, scheduler_output):
        if self.rank == 0 and IS_KILLED:
            self.exchange.connect(__file__ + ".socket")
            self.exchange.recv(1)  # until the other rank has ended
        if self.rank == 0 or not IS_KILLED:
            raise RuntimeError("Connection reset by peer")
        connection, _ = self.exchange.accept()
        os.kill(os.getpid(), signal.SIGKILL)

    def execute_dummy_batch(self):
        self.execute_model(None)

parser = argparse.ArgumentParser()
parser.add_argument("--address")
sys.stderr = open(os.devnull, "w")
os._exit(run_worker(parser.parse_known_args()[0].address, ResetWorker))
"""

ORPHAN_MAKER = """
import sys
from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.helpers import make_config
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.services.engine.core.workers import WORKER_COMMAND
executor = MultiprocExecutor(make_config(), WORKER_COMMAND)
print(executor.workers[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(
        make_config(async_scheduling=True, num_blocks=40), WORKER_COMMAND, world_size=request.param
    )
    yield executor
    executor.shutdown()
    executor.shutdown()


def test_a_core_over_processes_gives_every_request_its_tokens(executor: MultiprocExecutor) -> None:
    core = EngineCore(make_config(async_scheduling=True, num_blocks=40), executor)
    for n in range(12):
        core.add_request(make_request(f"r{n}", [n] * (n + 1), 12))
    outputs = finish(core, 3000)
    for n in range(12):
        assert tokens_of(outputs[f"r{n}"]) == expected_tokens([n] * (n + 1), 12)
    check_idle(core.scheduler)


def test_large_arrays_are_read_in_place_by_every_rank(executor: MultiprocExecutor) -> None:
    core = EngineCore(make_config(async_scheduling=True, num_blocks=40), executor)
    requests = [make_mixed(f"wide{seed}", make_wide(3, 20, seed)) for seed in range(3)]
    for request in requests:
        core.add_request(request)
    core.step()
    assert executor._arena.num_lent == 3
    outputs = finish(core)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected(request, DEFAULT_VOCAB_SIZE)
    core.add_request(make_request("next", [1]))  # with its step the workers hear that the others have ended
    finish(core)
    assert wait_until(lambda: executor._arena.num_lent == 0, 60.0)


def test_calls_by_name_are_answered_by_every_rank(executor: MultiprocExecutor) -> None:
    models = executor.collective_rpc("load_model")
    assert len(models) == len(executor.workers)
    assert all(isinstance(model, dict) and model["vocab_size"] == DEFAULT_VOCAB_SIZE for model in models)
    with pytest.raises(ValueError, match="HashWorker has no method 'shutdown' to call"):
        executor.collective_rpc("shutdown")
    with pytest.raises(ValueError, match="Expected `object`"):
        executor.collective_rpc("initialize_kv_cache", "many")
    assert executor.collective_rpc("determine_available_memory") == [64 << 20] * len(models)


def test_a_worker_that_does_not_answer_is_not_healthy_until_it_does(executor: MultiprocExecutor) -> None:
    executor.check_health(10)
    os.kill(executor.workers[-1].pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            ExecutorFailedError, match=f"no answer within 0.05 s from worker {len(executor.workers) - 1}"
        ):
            executor.check_health(0.05)
    finally:
        os.kill(executor.workers[-1].pid, signal.SIGCONT)
    executor.check_health(10)
    assert not executor._late
    assert not any(executor._replies)


def test_a_failed_step_is_raised_to_the_caller(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(FAILING_WORKER)
    executor = MultiprocExecutor(make_config(), [sys.executable, str(script)])
    core = EngineCore(make_config(), executor)
    core.add_request(make_request("a", [1, 2]))
    with pytest.raises(ExecutorFailedError, match="worker 0: RuntimeError: broken"):
        core.step()
    core.shutdown()


def fail_in_two(tmp_path: Path, *, is_killed: bool, is_dummy: bool) -> ExecutorFailedError:
    """Return the error of two workers of which the first one fails, and the other one fails or is killed."""
    script = tmp_path / "worker.py"
    script.write_text(RESET_WORKER.replace("IS_KILLED", str(is_killed)))
    config = msgspec.structs.replace(make_config(), parallel=ParallelConfig(tensor_parallel_size=2))
    executor = MultiprocExecutor(config, [sys.executable, str(script)])
    core = EngineCore(config, executor)
    core.add_request(make_request("a", [1, 2]))
    with pytest.raises(ExecutorFailedError) as failed:
        executor.collective_rpc("execute_dummy_batch") if is_dummy else core.step()
    core.shutdown()
    return failed.value


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_rank_that_fails_because_another_was_killed_is_no_failure_of_its_own(tmp_path: Path, is_dummy: bool) -> None:
    error = fail_in_two(tmp_path, is_killed=True, is_dummy=is_dummy)
    assert (type(error), str(error)) == (WorkerLostError, "worker 1 ended with status -9")


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_rank_whose_weights_are_damaged_is_the_cause_whichever_fails_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dummy: bool
) -> None:
    damaged = (
        "from tokenloom.engine_core.data.errors import WeightsDamagedError\n        raise WeightsDamagedError('x')"
    )
    script = RESET_WORKER.replace("os.kill(os.getpid(), signal.SIGKILL)", damaged)
    monkeypatch.setitem(globals(), "RESET_WORKER", script)
    error = fail_in_two(tmp_path, is_killed=True, is_dummy=is_dummy)
    assert (type(error), str(error)) == (WeightsDamagedError, "worker 1: x")


def test_damaged_weights_are_the_cause_though_two_others_fail_first() -> None:
    """The answer of the second of these was taken for the last one that comes."""
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = [context.socket(zmq.PAIR) for _ in range(3)]
    executor.workers = []
    for rank, end in enumerate(ends):
        end.bind(f"inproc://{rank}")
        worker = create_autospec(WorkerProcess, instance=True, rank=rank, socket=context.socket(zmq.PAIR))
        worker.socket.connect(f"inproc://{rank}")
        executor.workers.append(worker)
    executor._watch = multiproc.WorkerWatch()
    executor._replies, executor._late = [{}, {}, {}], {}
    executor._decoder = Decoder(WorkerReply)

    def fail(rank: int, kind: WorkerErrorKind) -> None:
        ends[rank].send_multipart(encode(WorkerReply(1, error_kind=kind, error="x")))

    fail(1, WorkerErrorKind.FAILED)
    late = threading.Timer(0.02, fail, (2, WorkerErrorKind.DAMAGED))
    late.start()
    with pytest.raises(WeightsDamagedError, match="worker 2: x"):
        executor._raise_failure(0, WorkerReply(1, error_kind=WorkerErrorKind.FAILED, error="reset by peer"))
    late.join()
    executor._watch.close("")
    context.destroy(linger=0)


def test_a_rank_that_fails_alone_is_not_waited_for_until_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other rank is about to end, so that none was killed."""
    monkeypatch.setattr(multiproc, "_END_SECONDS", 3600.0)
    alone = RESET_WORKER.replace("if self.rank == 0 or not IS_KILLED:", "if self.rank == 0:").replace(
        "connection, _ = self.exchange.accept()", "threading.Event().wait()  # as in an exchange of tensors"
    )
    monkeypatch.setitem(globals(), "RESET_WORKER", alone)
    error = fail_in_two(tmp_path, is_killed=False, is_dummy=False)
    assert (type(error), str(error)) == (ExecutorFailedError, "worker 0: RuntimeError: Connection reset by peer")


def test_ranks_that_end_because_their_step_failed_are_not_lost(tmp_path: Path) -> None:
    """Others in their place would fail like them, and nobody would learn why."""
    error = fail_in_two(tmp_path, is_killed=False, is_dummy=False)
    assert type(error) is ExecutorFailedError
    assert str(error)[len("worker 0") :] == ": RuntimeError: Connection reset by peer"


def test_a_killed_worker_fails_the_waiting_step_and_wakes_an_idle_core() -> None:
    told = threading.Event()
    executor = MultiprocExecutor(make_config(), WORKER_COMMAND)
    core = EngineCore(make_config(), executor)
    executor.on_failure(told.set)
    core.add_request(make_request("a", [1, 2], 200))
    core.step()
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    assert told.wait(60)
    with pytest.raises(ExecutorFailedError, match="worker 0 ended with status -9"):
        core.step()
    core.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_workers_are_replaced_and_requests_computed_anew(world_size: int, asynchronous: bool) -> None:
    config = make_config(async_scheduling=asynchronous, num_blocks=40, kv_events=True)
    executor = MultiprocExecutor(config, WORKER_COMMAND, world_size=world_size)
    core = EngineCore(config, executor)
    for n in range(4):
        core.add_request(make_request(f"r{n}", [n] * (n + 5), 12))
    outputs = [output for _ in range(4) for output in core.step().outputs]
    before = [worker.pid for worker in executor.workers]
    os.kill(before[-1], signal.SIGKILL)
    assert wait_until(lambda: bool(executor._watch.failure), 60.0)
    with pytest.raises(WorkerLostError, match=f"worker {world_size - 1} ended with status -9"):
        finish(core, 3000)
    core.replace_workers()
    assert core.scheduler.kv_events is not None
    assert AllBlocksCleared() in core.scheduler.kv_events.events, "the KV of the old workers is gone"
    rest = finish(core, 3000)
    for n in range(4):
        begun = [output for output in outputs if output.request_id == f"r{n}"]
        assert tokens_of([*begun, *rest[f"r{n}"]]) == expected_tokens([n] * (n + 5), 12)
    assert not {worker.pid for worker in executor.workers} & set(before)
    assert all(has_ended(pid) for pid in before)
    check_idle(core.scheduler)
    core.shutdown()
    with pytest.raises(WorkerLostError, match="shut down"):
        executor.check_health(1)


def test_a_message_to_a_worker_that_has_just_ended_does_not_wait_forever() -> None:
    executor = MultiprocExecutor(make_config(), WORKER_COMMAND)
    core = EngineCore(make_config(), executor)
    (worker,) = executor.workers
    with executor._watch._lock:  # its end is not noticed yet
        os.kill(worker.pid, signal.SIGKILL)
        while worker.socket.poll(0, zmq.POLLOUT):
            pass
        threading.Timer(0.1, executor._watch._lock.release).start()
        core.add_request(make_request("a", [1, 2], 3))
        with pytest.raises(WorkerLostError, match="status -9"):
            core.step()
        executor._watch._lock.acquire()
    core.shutdown()


def test_new_workers_have_the_weights_that_the_old_ones_were_given(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(RELOADING_WORKER)
    executor = MultiprocExecutor(make_config(), [sys.executable, str(script)])
    core = EngineCore(make_config(), executor)
    executor.collective_rpc("reload_weights", "/new/weights")
    core.replace_workers()
    assert executor.collective_rpc("resident_bytes") == [len("/new/weights")]
    core.shutdown()


def test_a_call_that_only_some_ranks_make_is_no_refusal(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(DIFFERING_WORKER)
    executor = MultiprocExecutor(make_config(), [sys.executable, str(script)], world_size=2)
    try:
        with pytest.raises(RanksDifferError, match="worker 1: /new: No such file or directory; done by worker 0"):
            executor.collective_rpc("check_weights", "/new")
        with pytest.raises(ValueError, match=r"^/refused/by/all: No such file or directory$"):
            executor.collective_rpc("check_weights", "/refused/by/all")
        with pytest.raises(RanksDifferError, match="worker 1: OSError: the disk failed"):
            executor.collective_rpc("reload_weights", "/new")
        assert executor._weights == "", "new workers load the weights that all had"
        assert executor.collective_rpc("resident_bytes") == [7, 7]
    finally:
        executor.shutdown()


def test_an_error_of_a_starting_worker_is_reported_by_its_cause(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(REFUSING_WORKER)
    with pytest.raises(ValueError, match="dtype is not supported"):
        MultiprocExecutor(make_config(), [sys.executable, str(script)])
    with pytest.raises(ExecutorFailedError, match="worker 0 ended with status 3 while it started"):
        MultiprocExecutor(make_config(), [sys.executable, "-c", "raise SystemExit(3)"])


def test_a_worker_that_never_says_that_it_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_launch, "HELLO_SECONDS", 0.0)
    with pytest.raises(ExecutorFailedError, match="worker 0 has sent nothing for 0 s since its start: the machine"):
        MultiprocExecutor(make_config(), [sys.executable, "-c", "import sys; sys.stdin.read()"])


def test_a_rank_that_fails_at_the_start_is_told_of_while_another_waits_for_it(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(WAITING_WORKER)
    executor = MultiprocExecutor(make_config(), [sys.executable, str(script)], world_size=2)
    try:
        with pytest.raises(ValueError, match=r"^the file is broken$"):
            executor.load_model()
    finally:
        executor.shutdown()


def test_the_ranks_of_all_engines_divide_the_host_s_memory(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(DIVIDING_WORKER)
    config = make_config()
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, engines_on_host=3))
    executor = MultiprocExecutor(config, [sys.executable, str(script)], world_size=2)
    try:
        assert executor.determine_available_memory() == 200
    finally:
        executor.shutdown()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_dies_with_its_parent(is_stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN_MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert not has_ended(pid)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
        # Its threads stop one after the other, and the system continues only a process that has stopped.
        assert wait_until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text(), 20.0)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: has_ended(pid), 20.0)
    parent.stdin.close()
    parent.stdout.close()


def mp_config() -> EngineConfig:
    return msgspec.structs.replace(make_config(), parallel=ParallelConfig(distributed_executor_backend="mp"))


def workers_of(client: SyncMPClient) -> list[int]:
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    return [int(child) for child in children]


def test_a_core_replaces_a_killed_worker_and_ends_when_the_next_one_is_killed_too() -> None:
    client = SyncMPClient(mp_config())
    (first,) = workers_of(client)
    client.add_request(make_request("a", [1, 2], 3))
    assert collect(client, 1)["a"].finish_reason is not None
    os.kill(first, signal.SIGKILL)  # while the core is idle
    assert wait_until(lambda: workers_of(client) not in ([], [first]), 60.0)
    client.add_request(make_request("b", [3, 4], 3))
    assert collect(client, 1)["b"].new_token_ids == expected_tokens([3, 4], 3)
    (second,) = workers_of(client)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        client.get_output()
    assert wait_until(lambda: has_ended(client.pid or 0), 60.0)
    client.close()


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")]
)
def test_a_process_that_the_system_refuses_is_a_worker_that_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Then it is tried again: see :mod:`tokenloom.engine_core.process.core_process`."""
    executor = MultiprocExecutor(make_config(), WORKER_COMMAND, world_size=2)
    core = EngineCore(make_config(), executor)
    start, started = subprocess.Popen, list["subprocess.Popen[bytes]"]()

    def refuse_the_second(*args: Any, **fields: Any) -> Any:
        if started:
            raise error
        started.append(start(*args, **fields))
        return started[0]

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse_the_second)
        with pytest.raises(ExecutorFailedError, match=f"cannot be replaced: .*{error.args[-1]}"):
            core.replace_workers()
    core.replace_workers()
    assert started[0].poll() is not None, "the one that had started has ended"
    core.add_request(make_request("a", [1, 2], 3))
    assert tokens_of(finish(core)["a"]) == expected_tokens([1, 2], 3)
    core.shutdown()
