"""Two keys and one prompt: what one tenant's request cached must not be visible in another's, whatever way it took."""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tests.attack.attack import Attack, Outcome
from tests.attack.target import MODEL, Setup, Target
from tests.attack.wire import request
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

SPLIT = Setup(flags=("--prefill", "1", "--decode", "1", "--pd-threshold", "16"))
_WORDS = ("dragon", "river", "castle", "winter", "garden", "letter", "copper", "violin", "market", "shadow", "orchard")
_SECONDS = 60.0
_MIN_TOKENS = 160
"""Fewer than each prompt has."""
_rng = random.Random(os.urandom(8))

Send = Callable[[Target, str, str], None]
"""Sends a text with a key, and waits for the answer."""


@dataclass(frozen=True)
class Way:
    """A way of a prompt into the mesh.

    Attributes:
        kind: Ways of one kind send a text as the same tokens.
        queries: How often the engines look the prompt up.
    """

    name: str
    send: Send
    kind: str = "text"
    queries: int = 1


def _text() -> str:
    """Return a text that no attack has sent before. All have as many tokens, and more than ten blocks of 16."""
    words = list(_WORDS) * 12
    _rng.shuffle(words)
    return " ".join(["Once", *words])


def _http(path: str, key: str, target: Target, **body: Any) -> None:
    status, answer = request(target, key, path, model=MODEL, **{"max_tokens": 1, **body})
    assert status == 200, answer


def _completion(target: Target, key: str, text: str) -> None:
    _http("/v1/completions", key, target, prompt=text)


def _stream(target: Target, key: str, text: str) -> None:
    _http("/v1/completions", key, target, prompt=text, stream=True)


def _samples(target: Target, key: str, text: str) -> None:
    _http("/v1/completions", key, target, prompt=text, n=2, temperature=1.0)


def _batch(target: Target, key: str, text: str) -> None:
    _http("/v1/completions", key, target, prompt=[text, "Once"])


def _beams(target: Target, key: str, text: str) -> None:
    _http("/v1/completions", key, target, prompt=text, use_beam_search=True, n=2, max_tokens=1)


def _chat(target: Target, key: str, text: str) -> None:
    _http("/v1/chat/completions", key, target, messages=[{"role": "user", "content": text}])


@contextmanager
def _channel(target: Target) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target.grpc) as channel:
        yield channel


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def _generate_request(text: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(model=MODEL, text=text, sampling_params=types_pb2.SamplingParams(max_tokens=1))


def _grpc(target: Target, key: str, text: str) -> None:
    with _channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(_generate_request(text), metadata=_metadata(key), timeout=_SECONDS))


def _session(target: Target, key: str, text: str) -> None:
    with _channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        turns = iter([_generate_request(text)])
        assert list(stub.GenerateSession(turns, metadata=_metadata(key), timeout=_SECONDS))


def _grpc_chat(target: Target, key: str, text: str) -> None:
    message = inference_pb2.ChatMessage(role="user", content=text)
    asked = inference_pb2.GenerateRequest(
        model=MODEL,
        chat=inference_pb2.ChatPrompt(messages=[message]),
        sampling_params=types_pb2.SamplingParams(max_tokens=1),
    )
    with _channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(asked, metadata=_metadata(key), timeout=_SECONDS))


def _infer_request(text: str) -> grpc_service_pb2.ModelInferRequest:
    asked = grpc_service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = asked.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    asked.parameters["max_tokens"].int64_param = 1
    return asked


def _kserve(target: Target, key: str, text: str) -> None:
    with _channel(target) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(_infer_request(text), metadata=_metadata(key), timeout=_SECONDS).outputs


def _kserve_stream(target: Target, key: str, text: str) -> None:
    with _channel(target) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        turns = iter([_infer_request(text)])
        responses = list(stub.ModelStreamInfer(turns, metadata=_metadata(key), timeout=_SECONDS))
        assert not any(response.error_message for response in responses)


WAYS = [
    Way("completions", _completion),
    Way("stream", _stream),
    Way("n=2", _samples, queries=2),
    Way("batch", _batch),
    Way("beams", _beams),
    Way("grpc", _grpc),
    Way("session", _session),
    Way("kserve", _kserve),
    Way("kserve stream", _kserve_stream),
    Way("chat", _chat, "chat"),
    Way("grpc chat", _grpc_chat, "chat"),
]


def _hits(target: Target, way: Way, key: str, text: str) -> int:
    """Return how many tokens of a prompt the engines found in their caches, as the engines count."""
    hits, queries = target.prefix_cache()
    way.send(target, key, text)
    deadline = time.monotonic() + _SECONDS
    while (now := target.prefix_cache())[1] < queries + way.queries * _MIN_TOKENS:  # counts follow the answers
        assert time.monotonic() < deadline, f"the engines did not count the request sent by {way.name}"
    return now[0] - hits


def shared_prompts(target: Target) -> Outcome:
    """Send a prompt with one key in each way, and again with the other key in each way of the same kind."""
    own = {way.name: _hits(target, way, target.neighbour, _text()) for way in WAYS}  # samples share their own prompt
    crossed, unproven, pairs = [], [], 0
    ways = [(first, second) for first, second in itertools.product(WAYS, WAYS) if first.kind == second.kind]
    for first, second in ways:
        text = _text()
        first.send(target, target.key, text)
        if (hits := _hits(target, second, target.neighbour, text)) > own[second.name]:
            crossed.append(f"{first.name} to {second.name}: {hits - own[second.name]} tokens")
        if _hits(target, second, target.key, text) <= own[second.name]:  # the same tenant's own blocks are found
            unproven.append(f"{first.name} to {second.name}")
        pairs += 1
    wrong = [f"crossed in {len(crossed)} of {pairs} pairs of ways, for example {crossed[0]}"] if crossed else []
    wrong += [f"the cache found nothing of the same tenant: {', '.join(unproven)}"] if unproven else []
    return Outcome(f"{len(crossed)} of {pairs} pairs crossed", wrong)


def usage(target: Target) -> Outcome:
    """Read ``cached_tokens`` of a prompt that only the other key has sent, over the three ways that report it."""
    seen = {}
    for name, read in (("completions", _cached_http), ("chat", _cached_chat), ("grpc", _cached_grpc)):
        text = _text()
        read(target, target.key, text)
        seen[name] = read(target, target.neighbour, text)
        assert read(target, target.key, text) > 0, f"{name} reports no cached tokens of the same tenant"
    wrong = [f"cached_tokens over {name}: {tokens}" for name, tokens in seen.items() if tokens]
    return Outcome("/".join(map(str, seen.values())) + " cached tokens", wrong)


def _cached_http(target: Target, key: str, text: str) -> int:
    return _cached(request(target, key, model=MODEL, prompt=text, max_tokens=1))


def _cached_chat(target: Target, key: str, text: str) -> int:
    messages = [{"role": "user", "content": text}]
    return _cached(request(target, key, "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=1))


def _cached(answered: tuple[int, Any]) -> int:
    status, answer = answered
    assert status == 200, answer
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def _cached_grpc(target: Target, key: str, text: str) -> int:
    with _channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        *_, last = stub.Generate(_generate_request(text), metadata=_metadata(key), timeout=_SECONDS)
        return int(last.usage.cached_tokens)


ATTACKS = [
    Attack("cached-tokens", usage),
    Attack("cached-blocks", shared_prompts),
    Attack("cached-tokens-split", usage, SPLIT),
    Attack("cached-blocks-split", shared_prompts, SPLIT),
]
