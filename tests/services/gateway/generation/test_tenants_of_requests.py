"""The tenant of a client's key reaches the tokenizer and the output processor over every API."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.gateway.tenants.tenant import CacheSalts
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc

SECRET = "0123456789abcdef"
KEYS = ("sk-a", "sk-b")
DIGESTS = {key: hashlib.sha256(key.encode()).hexdigest() for key in KEYS}


@pytest.fixture
async def guarded(socket_dir: Path) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(socket_dir).gateway(api_key=KEYS, cache_salt_secret=SECRET) as mesh:
        yield mesh


def salt_of(key: str) -> bytes:
    return CacheSalts(SECRET.encode()).of(f"key:{DIGESTS[key]}")


async def post(mesh: FakeMesh, key: str, path: str, **body: Any) -> None:
    async with mesh.http(headers={"authorization": f"Bearer {key}"}) as http:
        response = await http.post(path, json={"model": MODEL, "max_tokens": 3, **body})
    assert response.status_code == 200, response.text


async def completion(mesh: FakeMesh, key: str) -> None:
    await post(mesh, key, "/v1/completions", prompt="ab", tenant="ignored")


async def token_ids(mesh: FakeMesh, key: str) -> None:
    await post(mesh, key, "/v1/completions", prompt=[1, 2])


async def truncated(mesh: FakeMesh, key: str) -> None:
    await post(mesh, key, "/v1/completions", prompt="abcdef", truncate_prompt_tokens=2)


async def prompt_list(mesh: FakeMesh, key: str) -> None:
    await post(mesh, key, "/v1/completions", prompt=["ab", "cd"], n=2)


async def chat(mesh: FakeMesh, key: str) -> None:
    await post(mesh, key, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])


def _request(**prompt: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL, sampling_params=types_pb2.SamplingParams(max_tokens=3), **(prompt or {"text": "ab"})
    )


async def generate(mesh: FakeMesh, key: str) -> None:
    async with open_channel(mesh.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.Generate(_request(), metadata=(("authorization", f"Bearer {key}"),)):
            pass


async def session(mesh: FakeMesh, key: str) -> None:
    turns = iter([_request(), _request(text="cd")])
    async with open_channel(mesh.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.GenerateSession(turns, metadata=(("authorization", f"Bearer {key}"),)):
            pass


async def kserve(mesh: FakeMesh, key: str) -> None:
    request = kserve_pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"ab")
    metadata = (("authorization", f"Bearer {key}"),)
    async with open_channel(mesh.grpc_address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(request, metadata=metadata)
        async for _ in stub.ModelStreamInfer(iter([request]), metadata=metadata):
            pass


@pytest.mark.parametrize(
    ("road", "num_requests"),
    [
        *((road, 1) for road in (completion, token_ids, truncated, chat, generate)),
        *((road, 2) for road in (prompt_list, session, kserve)),
    ],
)
async def test_every_request_has_its_tenants_name_and_salt(
    guarded: FakeMesh, road: Callable[[FakeMesh, str], Coroutine[Any, Any, None]], num_requests: int
) -> None:
    tasks = {key: asyncio.create_task(road(guarded, key)) for key in KEYS}  # at the same time, so that they may mix
    seen: dict[str, int] = {}
    for _ in range(len(KEYS) * num_requests):
        request = await guarded.outputs.next_request()
        submit = request.submit
        (key,) = (key for key in KEYS if submit.tenant == f"key:{DIGESTS[key][:16]}")
        seen[key] = seen.get(key, 0) + 1
        assert submit.prompt.cache_salt == salt_of(key)
        for prefix in submit.block_hash_prefixes:
            assert prefix == sum(submit.prompt.token_ids) + sum(salt_of(key)), "the tokenizer hashed without the salt"
        for sample in range(submit.num_samples or 1):
            request.finish(sample_index=sample)
    assert seen == dict.fromkeys(KEYS, num_requests)
    await asyncio.gather(*tasks.values())


async def test_a_beam_search_keeps_tenant_and_salt(guarded: FakeMesh) -> None:
    searching = asyncio.create_task(
        post(guarded, KEYS[0], "/v1/completions", prompt="ab", n=2, use_beam_search=True, max_tokens=1)
    )
    submit = (await guarded.outputs.next_request()).submit
    assert (submit.tenant, submit.prompt.cache_salt) == (f"key:{DIGESTS[KEYS[0]][:16]}", salt_of(KEYS[0]))
    searching.cancel()


async def test_without_keys_there_is_neither(mesh: FakeMesh) -> None:
    mesh.outputs.auto = None
    asking = asyncio.create_task(post(mesh, "any", "/v1/completions", prompt="ab"))
    request = await mesh.outputs.next_request()
    assert (request.submit.tenant, request.submit.prompt.cache_salt) == ("", b"")
    assert list(request.submit.block_hash_prefixes) == [sum(b"ab")]
    request.finish()
    await asking


async def test_a_clients_own_salt_counts_within_its_tenant(guarded: FakeMesh) -> None:
    salts = set[bytes]()
    for key, own in ((KEYS[0], "mine"), (KEYS[0], "mine"), (KEYS[0], "other"), (KEYS[1], "mine")):
        asking = asyncio.create_task(post(guarded, key, "/v1/completions", prompt="ab", cache_salt=own))
        request = await guarded.outputs.next_request()
        salt = request.submit.prompt.cache_salt
        assert len(salt) == len(salt_of(key))
        assert list(request.submit.block_hash_prefixes) == [sum(b"ab") + sum(salt)]
        salts.add(salt)
        request.finish()
        await asking
    assert len(salts | {salt_of(key) for key in KEYS}) == 3 + len(KEYS)


def test_a_client_cannot_name_a_tenant() -> None:
    names = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    names |= {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}
    assert not names & {"cache_salt", "tenant"}
