"""Where KV is, and whether it is held, is between engines: no client can say a word about it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from google.protobuf.descriptor import Descriptor

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.v1 import engine_pb2, inference_pb2, output_processor_pb2

KV_TYPES = {engine_pb2.KVSource.DESCRIPTOR.full_name, engine_pb2.KVGrant.DESCRIPTOR.full_name}
KV_FIELDS = {"kv_source", "hold_kv", "awaits_tokens", "kv_transfer_params", "lease_id", "engine_id", "engine_epoch"}


def within(message: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    """The message and all that it can hold."""
    if message.full_name not in seen:
        seen.add(message.full_name)
        yield message
        for field in message.fields:
            if field.message_type is not None:
                yield from within(field.message_type, seen)


@pytest.mark.parametrize(
    ("request_type", "carries"),
    [
        (inference_pb2.GenerateRequest, False),
        (output_processor_pb2.ProcessInput, True),  # from a gateway, which sets it for engines of the registry alone
        (engine_pb2.EngineInput, True),
    ],
)
def test_messages_from_the_public_side_cannot_carry_it(request_type: Any, carries: bool) -> None:
    messages = list(within(request_type.DESCRIPTOR, set()))
    assert any(message.full_name in KV_TYPES for message in messages) is carries
    assert any(field.name in KV_FIELDS for message in messages for field in message.fields) is carries


async def test_fields_of_a_body_change_nothing(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    source = {"engine_id": "prefill-0", "engine_epoch": 1, "lease_id": "AAAA", "num_tokens": 3}
    body = {"model": MODEL, "prompt": "hi", "seed": 1}
    response = await http.post("/v1/completions", json={**body, "kv_transfer_params": source})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_transfer_params"
    submits = []
    for extra in ({}, {"kv_source": source, "hold_kv": True, "awaits_tokens": True}):
        asking = asyncio.create_task(http.post("/v1/completions", json={**body, **extra}))
        request = await mesh.outputs.next_request()
        request.answer("fine")
        assert (await asking).status_code == 200
        submits.append((request.submit.prompt, request.submit.sampling_params, request.submit.text))
    assert submits[0] == submits[1]
