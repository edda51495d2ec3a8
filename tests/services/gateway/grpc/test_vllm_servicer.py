"""Tests how the messages of vLLM's contract are made: a large one does not hold up the gateway's other streams."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tokenloom.services.gateway.grpc.vllm_servicer import _Answer
from tokenloom.v1 import output_processor_pb2, types_pb2

TOP = 20


def logprobs(num_tokens: int) -> output_processor_pb2.SlotTextLogprobs:
    part = output_processor_pb2.SlotTextLogprobs(token_index=1)
    part.logprobs.top = TOP
    part.logprobs.sampled.extend([-1.0] * num_tokens)
    part.logprobs.rank.extend([1] * num_tokens)
    part.logprobs.token_id.extend([*range(TOP)] * num_tokens)
    part.logprobs.logprob.extend([-1.0] * (TOP * num_tokens))
    part.sampled_text.extend([b"a"] * num_tokens)
    part.token_text.extend([b"a"] * (TOP * num_tokens))
    return part


async def test_log_probabilities_of_a_long_prompt_are_written_in_slices() -> None:
    num_tokens = 4000
    generation: Any = SimpleNamespace(
        num_outputs=2,
        num_samples=2,
        prompt_of=lambda _: range(num_tokens + 1),
        prompt_logprobs={0: [logprobs(num_tokens)]},
    )
    options: Any = SimpleNamespace(num_logprobs=None, num_prompt_logprobs=TOP, stop=(), stop_token_ids=())
    answer = _Answer(generation, options, streams=False)
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.ensure_future(count())
    finished = output_processor_pb2.RequestFinished(reason=types_pb2.FINISH_REASON_LENGTH)
    for index in range(2):
        delta: Any = SimpleNamespace(index=index, token_ids=[1], token_index=0, logprobs=(), finished=finished)
        (response,) = [each async for each in answer.responses(delta)]
        inputs = response.complete.input_logprobs
        assert (len(inputs.token_ids), len(inputs.top_logprobs[-1].values)) == (num_tokens + 1, TOP)
    counting.cancel()
    assert num_turns >= num_tokens * TOP // 4096
