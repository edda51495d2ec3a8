"""A gateway before a model that pools."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.gateway.fakes import FakeMesh, FakeRequest
from tokenloom.v1 import types_pb2

EMBED, CLASSIFY, SCORE = (
    types_pb2.POOLING_TASK_EMBED,
    types_pb2.POOLING_TASK_CLASSIFY,
    types_pb2.POOLING_TASK_SCORE,
)
TOKEN_EMBED = types_pb2.POOLING_TASK_TOKEN_EMBED


@pytest.fixture
def tasks() -> list[types_pb2.PoolingTask]:
    """What the model serves."""
    return [EMBED, CLASSIFY, TOKEN_EMBED]


@pytest.fixture
def max_sentence_tokens() -> int:
    """To how many tokens the tokenizers cut texts that become vectors; 0: to none."""
    return 0


@pytest.fixture
async def mesh(
    socket_dir: Path, tasks: list[types_pb2.PoolingTask], max_sentence_tokens: int
) -> AsyncIterator[FakeMesh]:
    """Its vectors are the length of the prompt and its first token, its classes the shares of both."""
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = types_pb2.ModelLimits(
        max_model_len=512,
        vocab_size=256,
        pooling_tasks=tasks,
        generates=False,
        matryoshka=True,
        class_labels=["long", "high"],
    )
    mesh.outputs.pool = _pool
    for tokenizer in (mesh.tokenizer, mesh.second_tokenizer):
        tokenizer.max_sentence_tokens = max_sentence_tokens
    async with mesh.gateway():
        yield mesh


def _pool(request: FakeRequest) -> None:
    ids = request.submit.prompt.token_ids
    numbers = [float(len(ids)), float(ids[0])]
    match request.submit.pooling_params.task:
        case types_pb2.POOLING_TASK_TOKEN_EMBED:
            request.pool([float(each) for each in ids for _ in range(2)], [len(ids), 2])
        case types_pb2.POOLING_TASK_CLASSIFY:
            request.pool([number / sum(numbers) for number in numbers])
        case types_pb2.POOLING_TASK_SCORE:
            request.pool([len(ids) / 100], [])
        case _:
            request.pool(numbers)
    request.finish()
