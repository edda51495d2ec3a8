"""A gateway that sends whatever it likes gets answers or typed errors; what others send is answered as before."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.mutations import mutated
from tests.ready_channel import ready_channel
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.service import running
from tokenloom.services.tokenizer.service import TokenizerService
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.v1.tokenizer_pb2 import DecodeRequest, EncodeChatRequest, EncodeRequest
from tokenloom.v1.tokenizer_pb2_grpc import TokenizerStub

TEXTS = EncodeRequest(texts=["Once upon a time", "é😀"], add_special_tokens=True, want_hashes=True, cache_salt=b"s")
CHAT = EncodeChatRequest(messages_json=b'[{"role":"user","content":"hi"}]', add_generation_prompt=True)


@pytest.fixture
async def stub(socket_dir: Path) -> AsyncIterator[Any]:
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", max_text_bytes=10_000, render_workers=1, drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        yield TokenizerStub(channel)


@pytest.mark.parametrize("seed", range(6))
async def test_a_gateway(stub: Any, seed: int) -> None:
    rng = random.Random(seed)
    calls = (
        (stub.Encode, TEXTS),
        (stub.EncodeChat, CHAT),
        (stub.Decode, DecodeRequest(token_ids=[300, 301, 2], tenant="a")),
    )
    before = [await method(request) for method, request in calls]
    refused = 0
    for _ in range(60):
        method, request = rng.choice(calls)
        try:
            await method(mutated(request, rng, rng.randint(1, 3)))
        except grpc.aio.AioRpcError as failure:
            error = wire_errors.from_rpc(failure)
            assert type(error) is not errors.Internal, error.message
            refused += 1
    assert refused, "some are invalid"
    assert [await method(request) for method, request in calls] == before
