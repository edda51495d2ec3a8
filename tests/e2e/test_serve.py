"""``tokenloom serve`` with the demo model, as a user meets it."""

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import openai
import psutil
import pytest

from tokenloom import LLM, SamplingParams
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

QUESTION = [{"role": "user", "content": "What is prefill?"}]
STORY = [{"role": "user", "content": "Tell me a story about a dragon."}]
ANSWER = "Prefill is the first step of a request: the model reads the whole prompt at once and fills the KV cache."


@pytest.fixture
def mesh(default_mesh: Any) -> Any:
    return default_mesh()


@pytest.fixture
def client(mesh: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_demo_model_answers(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tokenloom-demo"]
    answer = client.chat.completions.create(model="tokenloom-demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "output_processor", "coordinator", "engine"])
def test_a_service_is_small(mesh: Any, service: str) -> None:
    """Of the engine, its front: the model is in another process."""
    process = mesh.part(service)
    assert process.memory_info().rss <= 200e6
    assert not [mapped.path for mapped in process.memory_maps() if "libtorch" in mapped.path]


def test_a_stream_says_the_same_in_pieces(client: openai.OpenAI) -> None:
    request = {"model": "tokenloom-demo", "messages": STORY, "temperature": 0}
    answer = client.chat.completions.create(**request).choices[0].message.content  # type: ignore[call-overload]
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == answer
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10


def test_the_first_pieces_of_a_long_answer_come_before_it_ends(client: openai.OpenAI) -> None:
    """A busy machine merges the pieces of a story, but not all of two seconds of decoding."""
    stream = client.completions.create(
        model="tokenloom-demo",
        prompt="Once upon a time",
        max_tokens=1900,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        first, second = itertools.islice((chunk for chunk in stream if chunk.choices[0].text), 2)
    assert first.choices[0].finish_reason is None
    assert second.choices[0].text


def test_samples_and_their_logprobs_are_those_of_the_offline_llm(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 7, "logprobs": 2, "max_tokens": 12}
    request = {"model": "tokenloom-demo", "prompt": "Once upon a time", **asked}
    whole = client.completions.create(**request)  # type: ignore[call-overload]
    pieces: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in client.completions.create(**request, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            pieces[choice.index].append(choice)
    with closing(LLM("tokenloom-demo")) as llm:
        (expected,) = llm.generate("Once upon a time", SamplingParams(**asked))
    assert len({choice.text for choice in whole.choices}) > 1
    for choice, output in zip(whole.choices, expected.outputs, strict=True):
        assert choice.text == output.text == "".join(piece.text for piece in pieces[choice.index])
        streamed = [value for piece in pieces[choice.index] for value in piece.logprobs.token_logprobs]
        assert choice.logprobs.token_logprobs == pytest.approx(streamed, abs=1e-4)
        told = [at[token_id].logprob for at, token_id in zip(output.logprobs, output.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(told, abs=1e-4)


def test_the_stubs_say_the_same_over_grpc(mesh: Any) -> None:
    gateway = next(part for part in mesh.ps() if part["service"] == "gateway")
    message = inference_pb2.ChatMessage(role="user", content=QUESTION[0]["content"])
    request = inference_pb2.GenerateRequest(
        model="tokenloom-demo",
        chat=inference_pb2.ChatPrompt(messages=[message]),
        sampling_params=types_pb2.SamplingParams(temperature=0),
    )
    with grpc.insecure_channel(gateway["address"]) as channel:
        responses = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    assert "".join(response.text for response in responses) == ANSWER


def test_ps_lists_every_part(mesh: Any) -> None:
    parts = mesh.ps()
    names = ["service", "index", "role", "pid", "address", "metrics", "health", "model", "fall_backs", "placement"]
    names.append("plugins")
    assert [list(part) for part in parts] == [names] * 5
    services = ["gateway", "output_processor", "engine", "tokenizer", "coordinator"]
    assert [(part["service"], part["index"], part["role"]) for part in parts] == [
        (service, 0, "both" if service == "engine" else None) for service in services
    ]
    assert {part["health"] for part in parts} == {"SERVING"}
    assert [part["pid"] for part in parts] == [mesh.part(service).pid for service in services]


def test_one_signal_lets_the_live_request_finish_and_leaves_nothing(
    mesh: Any, client: openai.OpenAI, remaining: Callable[[list[psutil.Process]], list[psutil.Process]]
) -> None:
    family = mesh.family()
    assert len(family) >= 7, "supervisor, five services, engine core"
    stream = client.completions.create(
        model="tokenloom-demo",
        prompt="Once upon a time",
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    chunks = [next(stream)]
    mesh.process.send_signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 100
    assert mesh.process.wait(60) == 0
    mesh.process.stdout.close()
    assert remaining(family) == []
    assert mesh.ps() == []
