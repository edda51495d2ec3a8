"""The front's link to the core: what fails alone, and what ends with the core."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings
from tokenloom.engine_core.data.errors import NotSentError
from tokenloom.engine_core.data.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PrefillStats,
)
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.core.core_link import FEWEST_OTHERS, CoreLink
from tokenloom.services.engine.records.attempt import Attempt, AttemptKV, AttemptTimes, TokenCounts
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.types_pb2 import FINISH_REASON_ERROR

UNSENDABLE = [9] * 13


class RefusingClient(AsyncInprocClient):
    async def add_request(self, request: EngineCoreRequest) -> None:
        if request.prompt_token_ids == UNSENDABLE:
            raise NotSentError("ADD: a message of 2000000 frames")
        await super().add_request(request)


async def test_a_request_that_cannot_be_passed_to_the_core_fails_alone(socket_dir: Path) -> None:
    settings = make_settings(socket_dir)
    config = settings.engine_config(str(DEMO_MODEL))
    service = EngineService(settings, RefusingClient(config, UniProcExecutor(HashWorker(config))))
    async with running(service, settings) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, UNSENDABLE), make_add(2, [1, 2]))
        received = await peer.read_until_finished([1, 2])
    assert received.finished[1].reason == FINISH_REASON_ERROR
    assert isinstance(wire_errors.from_proto(received.finished[1].error), errors.Internal)
    assert received.token_ids == {2: expected_tokens([1, 2], 5, VOCAB_SIZE)}


class FakeStream:
    """Holds attempts, and writes what it has in the next turn of the event loop, as a stream does."""

    may_move = is_amid_step = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def take_output(self, attempt: Attempt, output: EngineCoreOutput) -> None:
        self.events.append(output.request_id)

    def fail(self, slot: int, error: errors.TokenloomError) -> Attempt | None:
        raise AssertionError("no attempt fails")

    def notify(self) -> None:
        asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self.events.append("first tokens are written" if self.is_amid_step else "the rest is written")


async def distribute(*outputs: EngineCoreOutput) -> list[str]:
    """Return what happens to the outputs of a step, in order."""
    ignore: Any = SimpleNamespace(**dict.fromkeys(("observe", "accepted", "observe_output"), lambda *_: None))
    nothing: Any = None
    link, stream = CoreLink(nothing, nothing, ignore, ignore), FakeStream()
    for slot, output in enumerate(outputs):
        counts, times, kv = TokenCounts(1, 0, 0), AttemptTimes(0.0), AttemptKV(b"", awaits_tokens=False)
        key = output.request_id
        attempt = Attempt(slot, key, key, None, None, counts, times, kv, None)
        link.open(attempt, stream)
    await link._distribute(EngineCoreOutputs(outputs=list(outputs)))
    await asyncio.sleep(0)
    return stream.events


async def test_first_tokens_are_written_before_the_tokens_of_others_are_distributed() -> None:
    first = [EngineCoreOutput(name, [5], prefill_stats=PrefillStats(1, 0, 0, 0)) for name in ("new", "newer")]
    names = [f"r{number}" for number in range(FEWEST_OTHERS)]
    others = [EngineCoreOutput(name, [5], 3) for name in names]
    assert await distribute(*first, *others) == [
        *("new", "newer", "first tokens are written"),
        *(*names, "the rest is written"),
    ]
    assert await distribute(*first) == ["new", "newer", "the rest is written"]
    assert await distribute(*others) == [*names, "the rest is written"]
    assert await distribute(*first, *others[1:]) == ["new", "newer", *names[1:], "the rest is written"]
