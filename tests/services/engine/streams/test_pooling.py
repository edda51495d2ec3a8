"""Pooling requests over ``Engine.Connect``: results, split results and refusals."""

from pathlib import Path

import numpy as np
import pytest

from tests.services.engine.peer import VOCAB_SIZE, Peer, Received, make_add, make_settings, running_engine
from tokenloom.engine_core.data.core_params import CorePoolingParams, PoolingTask
from tokenloom.engine_core.fake_workers.hash_row import Floats, hash_pooled
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.streams.frame_builder import FrameBuilder
from tokenloom.v1 import types_pb2
from tokenloom.v1.engine_pb2 import AddRequest, Finished
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_STOP, LateInteraction

PROMPT = list(range(5, 60))
TASKS = [task for task in PoolingTask if task is not PoolingTask.ALIGN]
"""Those of models without a sound beside the prompt."""


def pooling_add(slot: int, prompt: list[int], task: PoolingTask = PoolingTask.EMBED, **params: object) -> AddRequest:
    add = make_add(slot, prompt)
    wire = types_pb2.PoolingParams(task=types_pb2.PoolingTask.ValueType(task), **params)  # type: ignore[arg-type]
    add.pooling_params.CopyFrom(wire)
    return add


def results(received: Received) -> dict[int, Floats]:
    """The results by slot, joined from their parts."""
    parts: dict[int, list[types_pb2.Pooled]] = {}
    for frame in received.frames:
        for part in frame.pooled:
            so_far = parts.setdefault(part.slot, [])
            assert part.offset == sum(len(each.data) for each in so_far) // 4
            so_far.append(part)
    return {
        slot: np.frombuffer(b"".join(part.data for part in each), "<f4").reshape(tuple(each[0].shape))
        for slot, each in parts.items()
    }


def expected(prompt: list[int], task: PoolingTask) -> Floats:
    prefix = np.column_stack((prompt, np.arange(len(prompt)))).astype(np.int32)
    return hash_pooled(prefix, CorePoolingParams(task))


async def test_results_come_next_to_tokens_and_in_parts(socket_dir: Path) -> None:
    async with running_engine(make_settings(socket_dir)) as host:
        peer = Peer(host.address)
        peer.hello.max_message_bytes = 1024
        async with peer:
            adds = [pooling_add(task, PROMPT, task) for task in TASKS]
            await peer.send(*adds, make_add(9, PROMPT, max_tokens=40))
            received = await peer.read_until_finished([*TASKS, 9])
    for task in TASKS:
        np.testing.assert_array_equal(results(received)[task], expected(PROMPT, task))
        assert received.finished[task].reason == FINISH_REASON_STOP
        assert not received.finished[task].num_output_tokens
    assert received.token_ids[9] == expected_tokens(PROMPT, 40, VOCAB_SIZE)
    assert max(frame.ByteSize() for frame in received.frames) <= 1024
    assert sum(bool(frame.pooled) for frame in received.frames) > 2


@pytest.mark.parametrize(
    ("add", "field", "text"),
    [
        (pooling_add(1, []), "prompt", "at least one token"),
        (pooling_add(1, PROMPT, dimensions=0), "dimensions", "at least 1"),
        (pooling_add(1, PROMPT, first_part_tokens=70), "first_part_tokens", "55 tokens"),
        (pooling_add(1, PROMPT, late_interaction=LateInteraction(query_id="a")), "late_interaction", "token_embed"),
    ],
)
async def test_refusals_name_the_field(socket_dir: Path, add: AddRequest, field: str, text: str) -> None:
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(add)
        error = wire_errors.from_proto((await peer.read_until_finished([1])).finished[1].error)
        assert isinstance(error, errors.InvalidArgument)
        assert error.field == field
        assert text in error.message


async def test_pooling_model_generates_nothing(socket_dir: Path) -> None:
    async with running_engine(make_settings(socket_dir, runner="pooling")) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, PROMPT), pooling_add(2, PROMPT))
        received = await peer.read_until_finished([1, 2])
        error = wire_errors.from_proto(received.finished[1].error)
        assert isinstance(error, errors.InvalidArgument)
        assert error.message == (
            "this model generates no tokens; its pooling tasks are: embed, classify, score, token_embed, token_classify"
        )
        assert received.finished[2].reason == FINISH_REASON_STOP


async def test_lost_query_has_an_error_of_its_own(socket_dir: Path) -> None:
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        task, query = PoolingTask.TOKEN_EMBED, LateInteraction(query_id="a", num_documents=1)
        await peer.send(pooling_add(1, PROMPT, task, late_interaction=query))
        await peer.read_until_finished([1])
        await peer.send(pooling_add(2, PROMPT, task, late_interaction=LateInteraction(query_id="a")))
        await peer.read_until_finished([2])
        await peer.send(pooling_add(3, PROMPT, task, late_interaction=LateInteraction(query_id="a")))
        received = await peer.read_until_finished([3])
        assert results(received)[1].shape == (0,)
        assert results(received)[2] == pytest.approx(len(PROMPT))
        assert isinstance(wire_errors.from_proto(received.finished[3].error), errors.QueryLost)


def test_part_of_an_aborted_result_is_dropped() -> None:
    builder = FrameBuilder(1024)
    builder.add_pooled(1, np.zeros(100, dtype=np.float32))
    builder.finish(Finished(slot=1, reason=FINISH_REASON_ABORT))
    frame = builder.take(1)
    assert not frame.pooled
    assert [end.slot for end in frame.finished] == [1]
    assert not builder.has_data
