"""The clients without an event loop: in process, and with the core in a process of its own."""

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.data.test_embedding_rows import expected, make_mixed, make_wide
from tests.engine_core.helpers import make_config, make_request
from tests.engine_core.processes import collect, has_ended, wait_until
from tokenloom.engine_core.client.core_client import CoreClient, InprocClient
from tokenloom.engine_core.data.config import ParallelConfig, WorkerConfig
from tokenloom.engine_core.data.errors import EngineDeadError, UtilityError
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import DEFAULT_VOCAB_SIZE, HashWorker, expected_tokens
from tokenloom.engine_core.wire.array_arena import MIN_BYTES

# Steps take a moment, so that what is asked in the middle of a request comes in the middle of it.
CONFIG = msgspec.structs.replace(make_config(), worker=WorkerConfig(model="", worker="hash", step_seconds=0.002))


@pytest.fixture(params=["inproc", "process"])
def client(request: pytest.FixtureRequest) -> Iterator[CoreClient]:
    client = (
        InprocClient(CONFIG, UniProcExecutor(HashWorker(CONFIG))) if request.param == "inproc" else SyncMPClient(CONFIG)
    )
    yield client
    client.close()


def test_batched_requests_give_their_own_tokens(client: CoreClient) -> None:
    assert client.ready.vocab_size == DEFAULT_VOCAB_SIZE
    prompts = {str(length): list(range(1, length + 1)) for length in (1, 3, 4, 5, 30)}
    for request_id, prompt in prompts.items():
        client.add_request(make_request(request_id, prompt, max_tokens=9))
    ended = collect(client, len(prompts))
    for request_id, prompt in prompts.items():
        assert ended[request_id].new_token_ids == expected_tokens(prompt, 9)
        assert ended[request_id].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.add_request(make_request("0", [1, 2], max_tokens=2)),
        lambda client: client.check_awake(),
        lambda client: client.get_output(),
        lambda client: client.call_utility("has_work"),
    ],
    ids=["add_request", "check_awake", "get_output", "call_utility"],
)
def test_a_closed_client_computes_nothing(client: CoreClient, call: Callable[[CoreClient], object]) -> None:
    client.add_request(make_request("before", [1, 2], max_tokens=2))
    client.close()
    with pytest.raises(EngineDeadError, match="the engine core was closed"):
        call(client)
    client.abort_requests(["before"])


def test_an_aborted_request_has_no_output_and_frees_its_blocks(client: CoreClient) -> None:
    client.add_request(make_request("gone", [1, 2, 3], max_tokens=200))
    client.add_request(make_request("stays", [4, 5, 6], max_tokens=30))
    client.get_output()
    client.abort_requests(["gone", "never was"])
    ended = collect(client, 1)
    assert list(ended) == ["stays"]
    client.add_request(make_request("last", [7]))
    while not (outputs := client.get_output()).outputs or outputs.outputs[0].request_id != "last":
        pass
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.num_running == 1
    assert outputs.scheduler_stats.num_free_blocks == client.ready.num_kv_blocks - 1


def test_a_refused_request_is_answered(client: CoreClient) -> None:
    client.add_request(make_request("too long", [1] * 5000))
    assert collect(client, 1)["too long"].finish_reason is FinishReason.ERROR
    client.add_request(make_request("fine", [1, 2], max_tokens=2))
    assert collect(client, 1)["fine"].new_token_ids == expected_tokens([1, 2], 2)


def test_utilities(client: CoreClient) -> None:
    assert client.call_utility("reset_prefix_cache") is True
    client.add_request(make_request("a", [1, 2], max_tokens=200))
    client.get_output()
    assert client.call_utility("reset_prefix_cache") is False  # and the steps of the meantime are not lost
    assert collect(client, 1)["a"].token_index == 199
    with pytest.raises(UtilityError, match="unknown utility 'eval'"):
        client.call_utility("eval", "1 + 1")
    with pytest.raises(UtilityError, match="argument"):
        client.call_utility("reset_prefix_cache", True, 1)


def test_a_wake_ends_a_wait_for_outputs_and_loses_none() -> None:
    client = SyncMPClient(CONFIG)
    try:
        wake = client.waker()
        woken = threading.Thread(target=wake)
        woken.start()
        outputs = client.get_output()  # of a core without requests, which would be waited for without end
        assert (outputs.outputs, outputs.scheduler_stats) == ([], None)
        woken.join()
        client.add_request(make_request("a", [1, 2, 3], max_tokens=3))
        for _ in range(100_000):  # more than the socket holds: nobody who wakes ever waits
            wake()
        seen = []
        while len(seen) < 3:
            seen += [token for output in client.get_output().outputs for token in output.new_token_ids]
        assert seen == expected_tokens([1, 2, 3], 3)
    finally:
        client.close()
    wake()  # after the end it does nothing
    client.close()


def test_a_wake_ends_a_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InprocClient(CONFIG, UniProcExecutor(HashWorker(CONFIG)))
    monkeypatch.setattr(client._core, "is_compiling", lambda: True)
    woken = threading.Thread(target=client.waker())
    woken.start()
    assert not client.get_output().outputs
    woken.join()
    client.close()


def test_a_killed_core_ends_a_wait_from_another_thread() -> None:
    client = SyncMPClient(CONFIG)
    client.add_request(make_request("a", [1, 2, 3], max_tokens=2000))
    client.get_output()
    client.kill()
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        collect(client, 1)
    client.close()


def test_an_abort_that_is_delivered_twice_does_no_harm(client: CoreClient) -> None:
    client.add_request(make_request("gone", [1, 2, 3], max_tokens=200))
    client.add_request(make_request("stays", [4, 5, 6], max_tokens=30))
    client.get_output()
    client.abort_requests(["gone"])
    client.abort_requests(["gone"])
    tokens = collect(client, 1)["stays"].new_token_ids
    assert tokens == expected_tokens([4, 5, 6], 30)[-len(tokens) :]
    client.add_request(make_request("gone", [1, 2, 3], max_tokens=4))  # the name is free again
    assert collect(client, 1)["gone"].new_token_ids == expected_tokens([1, 2, 3], 4)


def test_a_pause_that_waits_answers_when_nobody_runs(client: CoreClient) -> None:
    client.add_request(make_request("runs", [1, 2, 3], max_tokens=20))
    first = client.get_output()
    client.call_utility("pause", "wait")
    client.add_request(make_request("queues", [4, 5, 6], max_tokens=3))
    tokens = [token for output in first.outputs for token in output.new_token_ids]
    tokens += collect(client, 1)["runs"].new_token_ids
    assert tokens == expected_tokens([1, 2, 3], 20)
    with pytest.raises(UtilityError, match="paused in mode wait"):
        client.call_utility("pause", "keep")
    client.call_utility("resume")
    assert collect(client, 1)["queues"].new_token_ids == expected_tokens([4, 5, 6], 3)
    with pytest.raises(UtilityError, match="mode 'never' is unknown"):
        client.call_utility("pause", "never")


def test_a_core_that_waits_for_its_outputs_to_be_read_does_not_hold_up_a_large_request() -> None:
    """It reads only after it has sent 16 MiB, and the request has 8: without reading meanwhile, both wait."""
    client = SyncMPClient(CONFIG, command=[sys.executable, "-m", "tests.engine_core.client.deaf_core"])
    client.add_request(make_request("large", [70000] * (1 << 21)))
    names = []
    while names[-1:] != ["last"]:
        names += [output.request_id for output in client.get_output().outputs]
    assert names == [*map(str, range(64)), "last"]
    client.close()


def test_a_process_with_many_open_files_has_a_client_too() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("no process may open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while opened.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        client = SyncMPClient(CONFIG)
        opened.callback(client.close)
        client.add_request(make_request("a", [1, 2], max_tokens=5))
        assert collect(client, 1)["a"].new_token_ids == expected_tokens([1, 2], 5)


def test_an_interrupt_within_a_message_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SyncMPClient(CONFIG)
    client.add_request(make_request("a", [1, 2], max_tokens=5))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._receiver, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.get_output()
    for call in (client.get_output, client.check_awake, lambda: client.call_utility("is_sleeping")):
        with pytest.raises(EngineDeadError, match="was interrupted: KeyboardInterrupt"):
            call()
    client.abort_requests(["a"])  # there is nothing to end
    assert client.pid is not None
    client.close()
    assert has_ended(client.pid)


def test_an_interrupt_after_a_part_of_a_message_was_sent_ends_the_core() -> None:
    client = SyncMPClient(CONFIG)
    connection = client._connection

    class Interrupted:
        def sendmsg(self, pieces: Sequence[bytes], *more: Any) -> int:
            connection.sendmsg([bytes(pieces[0])[:3]], *more)
            raise KeyboardInterrupt

    client._connection = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        client.add_request(make_request("a", [1, 2], max_tokens=5))
    client._connection = connection
    with pytest.raises(EngineDeadError, match="was interrupted: KeyboardInterrupt"):
        client.check_awake()
    client.close()


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_large_arrays_are_lent_to_the_core_and_its_worker_while_there_is_room(backend: str) -> None:
    parallel = ParallelConfig(distributed_executor_backend=backend, array_arena_bytes=5 * MIN_BYTES)
    client = SyncMPClient(msgspec.structs.replace(CONFIG, parallel=parallel))
    for around in range(2):
        requests = [make_mixed(str(seed), make_wide(2, 20, seed + around), length=25) for seed in range(4)]
        for request in requests:
            client.add_request(request)
        assert client._arena.num_lent == 2, "each takes two units: the others went in frames"
        ended = collect(client, 4)
        for request in requests:
            assert ended[request.request_id].new_token_ids == expected(request, DEFAULT_VOCAB_SIZE)
        client.add_request(make_request("next", [1]))  # with its step the worker hears that the others have ended
        collect(client, 1)
        assert wait_until(lambda: client._arena.num_lent == 0, 60.0)
    client.close()
