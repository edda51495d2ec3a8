"""Tests how the messages of vLLM's contract are made: a large one does not hold up the gateway's other streams."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tokenloom.request.sampling_params import MAX_SAMPLES
from tokenloom.services.gateway.grpc.vllm_servicer import WEIGHTS_METADATA, _Answer, _origin
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


def ended(*versions: str) -> Any:
    finished = [output_processor_pb2.RequestFinished(weights_version=each) for each in versions]
    return SimpleNamespace(finished=dict(enumerate(finished)))


def test_versions_are_named_by_output() -> None:
    assert _origin(ended("a" * 16, "a" * 16 + "+" + "b" * 16)) == [
        (WEIGHTS_METADATA, "a" * 16 + "," + "a" * 16 + "+" + "b" * 16)
    ]
    assert _origin(ended("", "")) == []


def test_versions_fit_into_what_clients_take_of_metadata() -> None:
    many = "+".join(f"{number:016x}" for number in range(10))
    one = "0" * 16
    ((_, value),) = _origin(ended(*[many] * (MAX_SAMPLES - 1), one))
    assert value.split(",") == [f"+{9:016x}"] * (MAX_SAMPLES - 1) + [one]
    assert len(value) < 4096
    ((_, value),) = _origin(ended("+".join([one, "1" * 16] * 200)))
    assert value == "+" + "1" * 16


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
