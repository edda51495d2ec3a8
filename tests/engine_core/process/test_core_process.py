"""The core's process: how it starts, ends, fails, and never outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.helpers import make_config, make_core, make_request
from tests.engine_core.processes import collect, failing_core, has_ended, wait_until
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data.errors import (
    EngineConfigError,
    EngineDeadError,
    EngineStartError,
    PeerLostError,
    WorkerLostError,
)
from tokenloom.engine_core.data.messages import EngineCoreOutputs, FinishReason, RequestType
from tokenloom.engine_core.data_parallel.group_link import GroupLink
from tokenloom.engine_core.data_parallel.messages import Roster, Welcome
from tokenloom.engine_core.data_parallel.wave_loop import WaveLoop
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.process import core_launch
from tokenloom.engine_core.process.core_process import EngineCoreProc
from tokenloom.engine_core.wire.frames import Decoder, FrameReceiver

ORPHAN_MAKER = """
import sys
from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.helpers import make_config
client = SyncMPClient(make_config())
print(client.pid, client._process.kv_address, flush=True)
sys.stdin.read()
"""


def test_a_core_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineConfigError, match=r"^max_model_len is 9999"):
        SyncMPClient(make_config(max_model_len=9999))
    assert capfd.readouterr().err == "", "its client has the words, and a traceback tells an operator nothing more"


def test_a_core_that_dies_while_it_starts_is_noticed() -> None:
    with pytest.raises(EngineStartError, match="the engine core ended with status 3 while it started"):
        SyncMPClient(make_config(), command=[sys.executable, "-c", "raise SystemExit(3)"])


def test_a_core_that_never_says_that_it_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_launch, "HELLO_SECONDS", 0.0)
    with pytest.raises(EngineStartError, match="the engine core has sent nothing for 0 s since its start: the machine"):
        SyncMPClient(make_config(), command=[sys.executable, "-c", "import sys; sys.stdin.read()"])


def test_sigterm_lets_live_requests_finish_and_refuses_new_ones() -> None:
    config = make_config(num_blocks=1024)
    worker = msgspec.structs.replace(config.worker, step_seconds=0.01)
    client = SyncMPClient(msgspec.structs.replace(config, worker=worker))
    assert client.pid is not None
    client.add_request(make_request("live", [1, 2], max_tokens=30))
    client.add_request(make_request("lasting", [5, 6], max_tokens=4000))  # keeps the core up for 40 s if not aborted
    client.get_output()
    os.kill(client.pid, signal.SIGTERM)
    client.add_request(make_request("late", [3, 4], max_tokens=2))
    ended = collect(client, 2)
    assert ended["live"].new_token_ids[-20:] == expected_tokens([1, 2], 30)[-20:]
    assert ended["late"].finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)  # the signal may come after it
    client.abort_requests(["lasting"])
    with pytest.raises(EngineDeadError, match="status 0"):
        collect(client, 1)
    client.close()


def test_requests_that_came_before_a_shutdown_are_served_and_later_ones_refused() -> None:
    near, far = socket.socketpair()
    with near, far:
        proc = EngineCoreProc(make_core(), far)
        inputs = proc._input.input_queue
        inputs.put((RequestType.ADD, make_request("before", [1, 2], max_tokens=3)))
        proc.request_shutdown()
        inputs.put((RequestType.ADD, make_request("after", [1, 2], max_tokens=3)))
        proc.run()
        receiver, decoder = FrameReceiver(near), Decoder(EngineCoreOutputs)
        ends: dict[str, FinishReason] = {}
        while set(ends) != {"before", "after"}:
            for output in decoder.decode(receiver.receive()).outputs:
                if output.finish_reason is not None:
                    ends[output.request_id] = output.finish_reason
    assert ends == {"before": FinishReason.LENGTH, "after": FinishReason.ERROR}


def test_a_worker_that_is_lost_in_the_batch_of_an_idle_rank_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    core, calls = make_core(), []

    def lose(method: str) -> list[object]:
        calls.append(method)
        raise WorkerLostError("worker 1 ended with status -9")

    monkeypatch.setattr(core.executor, "collective_rpc", lose)
    monkeypatch.setattr(core, "replace_workers", lambda: calls.append("replace"))
    near, far = socket.socketpair()
    with near, far:
        EngineCoreProc(core, far)._compute_dummy()
    assert calls == ["execute_dummy_batch", "replace"]


def test_a_worker_that_is_lost_while_it_joins_other_ranks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    core, calls = make_core(), []

    def lose(message: object) -> None:
        raise WorkerLostError("worker 1 ended with status 1")

    monkeypatch.setattr(core, "replace_workers", lambda: calls.append("replace"))
    near, far = socket.socketpair()
    with near, far:
        proc = EngineCoreProc(core, far)
        monkeypatch.setattr(proc, "_process_group", lose)
        proc._process((RequestType.GROUP, 1))
    assert calls == ["replace"]


def test_workers_that_were_started_again_for_a_lost_peer_are_not_replaced_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, calls = make_core(), []

    class Group:
        def settle(self) -> None: ...

        def take_updates(self) -> None: ...

    near, far = socket.socketpair()
    with near, far:
        proc = EngineCoreProc(core, far)
        proc._group, proc._parallel = cast(WaveLoop, Group()), ParallelConfig(tensor_parallel_size=2)

        def replace() -> None:
            calls.append("replace")
            proc.executor_failed()  # a worker ends after its step has failed

        monkeypatch.setattr(core, "replace_workers", replace)
        proc._rejoin_peers(PeerLostError("a worker of another engine has ended"))
        proc._process(proc._input.input_queue.get())
    assert calls == ["replace"]


def test_a_worker_that_is_lost_while_it_joins_others_is_replaced_outside_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, calls = make_core(), []

    def rpc(method: str, *_: object) -> list[object]:
        calls.append(method)
        if method == "join_experts":
            raise WorkerLostError("worker 0 ended with status -9")
        return ["127.0.0.1:7"]

    monkeypatch.setattr(core.executor, "collective_rpc", rpc)
    monkeypatch.setattr(core, "replace_workers", lambda: calls.append("replace"))
    config = ParallelConfig(
        enable_expert_parallel=True, data_parallel_size=2, data_parallel_rank=1, data_parallel_address="unix:/group"
    )
    near, far = socket.socketpair()
    with near, far:
        proc = EngineCoreProc(core, far)
        proc.join_group(cast(GroupLink, FakeLink(calls)), config)
        roster = Roster(1, [0, 1], [["127.0.0.1:5"], ["127.0.0.1:6"]], b"nonce")
        proc._process((RequestType.GROUP, (Welcome(0, 0, runs=False, size=2, roster=roster), 0)))
    assert calls == ["join_experts", "step back", "replace", "listen_experts", "come again"]


class FakeLink:
    """Notes when the rank leaves its group and comes again."""

    address = "unix:/group"

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def start(self, *_: object) -> None: ...

    def cast(self, vote: object) -> None: ...

    def is_current(self, connection: int) -> bool:
        return True

    def key_of(self, roster: Roster) -> bytes:
        return roster.nonce

    def listen_again(self) -> None: ...

    def step_back(self) -> None:
        self._calls.append("step back")

    def come_again(self, workers: list[str]) -> None:
        self._calls.append("come again")


def test_a_failed_step_ends_the_core_and_tells_the_client(tmp_path: Path) -> None:
    client = SyncMPClient(make_config(), command=failing_core(tmp_path, "raise RuntimeError('broken')"))
    client.add_request(make_request("a", [1]))
    with pytest.raises(EngineDeadError, match="the engine core failed"):
        client.get_output()
    client.close()


def test_a_killed_core_is_noticed() -> None:
    client = SyncMPClient(make_config())
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="status -9"):
        client.get_output()
    with pytest.raises(EngineDeadError):
        client.call_utility("reset_prefix_cache")
    client.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_core_dies_with_its_parent(is_stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN_MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, address = parent.stdout.readline().split()
    core_pid, directory = int(pid), Path(address.removeprefix("ipc://")).parent
    assert not has_ended(core_pid)
    assert directory.is_dir()
    if is_stopped:
        os.kill(core_pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    ended = wait_until(lambda: has_ended(core_pid), 30.0)
    if not ended:
        os.kill(core_pid, signal.SIGKILL)
    assert ended
    assert not directory.exists()
    parent.stdin.close()
    parent.stdout.close()


def test_ctrl_c_of_the_terminal_leaves_the_core_to_its_parent() -> None:
    client = SyncMPClient(make_config())
    assert client.pid is not None
    assert os.getpgid(client.pid) != os.getpgid(0)
    os.kill(client.pid, signal.SIGINT)
    client.add_request(make_request("a", [1, 2], max_tokens=3))
    assert collect(client, 1)["a"].new_token_ids == expected_tokens([1, 2], 3)
    client.close()


def test_closing_leaves_no_process_and_no_socket() -> None:
    client = SyncMPClient(make_config())
    pid, directory = client.pid, Path(client._process.kv_address.removeprefix("ipc://")).parent
    assert pid is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    client.close()
    client.close()
    assert has_ended(pid)
    assert not directory.exists()
