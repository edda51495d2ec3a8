"""Every road by which a client's prompt reaches an engine; each returns how much of it was found in a cache."""

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.mesh.harness import MODEL, SOON, VOCAB_SIZE, Mesh, Part
from tests.ready_channel import ready_channel
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc

LENGTH = 100
"""Tokens of a prompt: six full blocks and a rest."""
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
LOADED = "vllm:external_prefix_cache_hits_total"


class Client:
    """Sends prompts under one key. Every prompt is made from a seed, so that clients with one seed send the same."""

    def __init__(self, mesh: Mesh, key: str) -> None:
        self.mesh = mesh
        self._bearer = f"Bearer {key}"

    async def cached(self, path: str, **body: Any) -> int:
        """Post a body and return ``cached_tokens`` of the answer's usage."""
        common = {"model": MODEL, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        async with self.mesh.http(headers={"authorization": self._bearer}) as http:
            response = await http.post(path, json=common | body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def generated(self, *requests: inference_pb2.GenerateRequest, session: bool = False) -> list[int]:
        """Send requests over gRPC and return ``cached_tokens`` of each one's usage."""
        found: list[int] = []
        metadata = (("authorization", self._bearer),)
        async with asyncio.timeout(SOON), ready_channel(self.mesh.gateway.settings.listen) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls: list[Any] = [stub.GenerateSession(iter(requests), metadata=metadata)] if session else []
            calls = calls or [stub.Generate(request, metadata=metadata) for request in requests]
            for call in calls:
                async for response in call:
                    if response.HasField("usage"):
                        found.append(response.usage.cached_tokens)
        return found

    async def inferred(self, seed: int, *, stream: bool) -> int:
        """Send a text by KServe's protocol. Its answer does not show what was cached, but the engine counts it."""
        request = kserve_pb.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            text_of(self.mesh, seed).encode()
        )
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
        request.parameters["max_tokens"].int64_param = 4
        metadata = (("authorization", self._bearer),)
        before, queries = counted(self.mesh, HITS), counted(self.mesh, QUERIES)
        async with asyncio.timeout(SOON), ready_channel(self.mesh.gateway.settings.listen) as channel:
            stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if stream:
                async for response in stub.ModelStreamInfer(iter([request]), metadata=metadata):
                    assert not response.error_message
            else:
                await stub.ModelInfer(request, metadata=metadata)
            while counted(self.mesh, QUERIES) == queries:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return counted(self.mesh, HITS) - before


def counted(mesh: Mesh, name: str) -> int:
    """Return the sum of a counter over all engines."""
    parts: Sequence[Part] = mesh.engines
    families = [family for part in parts if part.host is not None for family in part.host.metrics.collect()]
    return int(sum(sample.value for family in families for sample in family.samples if sample.name == name))


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


def text_of(mesh: Mesh, seed: int) -> str:
    """Return a text of about :data:`LENGTH` tokens."""
    words = random.Random(seed).choices(["bridge", "lantern", "river", "orchard", "signal", "harbour"], k=LENGTH)
    text = " ".join(words)
    beyond, _ = mesh.tokenizer.encode(text).offsets[LENGTH]
    return text[:beyond].strip()


def _request(**prompt: Any) -> inference_pb2.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=4, temperature=0.0)
    return inference_pb2.GenerateRequest(model=MODEL, sampling_params=sampling, ignore_eos=True, **prompt)


def _embeds(seed: int) -> bytes:
    rows = np.random.default_rng(seed).random((20, HIDDEN_SIZE), dtype=np.float32)
    return save({"prompt_embeds": rows})


async def completion(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=text_of(client.mesh, seed))


async def token_ids(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=ids_of(seed))


async def echo(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=text_of(client.mesh, seed), echo=True)


async def samples(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=ids_of(seed), n=3, temperature=1)


async def beams(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=ids_of(seed), n=2, use_beam_search=True, ignore_eos=False)


async def prompt_list(client: Client, seed: int) -> int:
    """Two prompts that share nothing, so that neither finds the other's blocks."""
    return await client.cached("/v1/completions", prompt=[ids_of(seed), ids_of(seed + 1000)])


async def truncated(client: Client, seed: int) -> int:
    return await client.cached("/v1/completions", prompt=text_of(client.mesh, seed), truncate_prompt_tokens=70)


async def embeddings(client: Client, seed: int) -> int:
    parts = [{"token_ids": ids_of(seed, 40)}, {"embeds": base64.b64encode(_embeds(seed)).decode()}]
    return await client.cached("/v1/completions", prompt_embeds=[*parts, {"token_ids": ids_of(seed, 30)}])


async def chat(client: Client, seed: int) -> int:
    return await client.cached("/v1/chat/completions", messages=_messages(client, seed))


def _messages(client: Client, seed: int) -> list[dict[str, str]]:
    """Begin with the seed: the template's own text fills no block, so only equal conversations share one."""
    return [{"role": "user", "content": f"{seed} {text_of(client.mesh, seed)}"}]


async def grpc_text(client: Client, seed: int) -> int:
    return sum(await client.generated(_request(text=text_of(client.mesh, seed))))


async def grpc_token_ids(client: Client, seed: int) -> int:
    return sum(await client.generated(_request(token_ids=types_pb2.TokenIds(ids=ids_of(seed)))))


async def grpc_chat(client: Client, seed: int) -> int:
    (message,) = _messages(client, seed)
    chat_message = inference_pb2.ChatMessage(role=message["role"], content=message["content"])
    prompt = inference_pb2.ChatPrompt(messages=[chat_message])
    return sum(await client.generated(_request(chat=prompt)))


async def grpc_embeddings(client: Client, seed: int) -> int:
    parts = [
        inference_pb2.PromptPart(token_ids=types_pb2.TokenIds(ids=ids_of(seed, 40))),
        inference_pb2.PromptPart(embeds=_embeds(seed)),
    ]
    return sum(await client.generated(_request(parts=inference_pb2.PromptParts(parts=parts))))


async def session(client: Client, seed: int) -> int:
    """Only the first turn counts: a later one finds the session's own earlier turns."""
    turns = [_request(token_ids=types_pb2.TokenIds(ids=ids)) for ids in (ids_of(seed), [5, 6, 7])]
    first, second = await client.generated(*turns, session=True)
    assert second >= 96
    return first


async def kserve(client: Client, seed: int) -> int:
    return await client.inferred(seed, stream=False)


async def kserve_stream(client: Client, seed: int) -> int:
    return await client.inferred(seed, stream=True)


Road = Callable[[Client, int], Awaitable[int]]
ROADS: Sequence[Road] = (
    *(completion, token_ids, echo, samples, beams, prompt_list, truncated, embeddings, chat),
    *(grpc_text, grpc_token_ids, grpc_chat, grpc_embeddings, session, kserve, kserve_stream),
)
