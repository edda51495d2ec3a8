"""Calls to the tokenizer replicas. They are stateless, so a call that one could not answer goes to another."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import grpc
import grpc.aio

from tokenloom.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from ..runtime import errors
from ..runtime.channels import Channels
from ..runtime.hello import fingerprint_difference
from .job import Chat

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""How often each replica is asked who it is; also how soon a lost one is noticed by ``healthy``."""

T = TypeVar("T")


class TokenizerClient:
    """Round-robin over the replicas that answer and agree with the first one on what they serve."""

    def __init__(self, addresses: Sequence[str], channels: Channels) -> None:
        self._addresses = tuple(addresses)
        self._channels = channels
        self._stubs: list[tokenizer_pb2_grpc.TokenizerAsyncStub] = []
        self._alive: set[int] = set()
        self._turn = 0
        self._known = asyncio.Event()
        self._info: tokenizer_pb2.GetTokenizerInfoResponse | None = None

    @property
    def info(self) -> tokenizer_pb2.GetTokenizerInfoResponse | None:
        """What the replicas serve; None until the first one answered."""
        return self._info

    @property
    def healthy(self) -> bool:
        return bool(self._alive)

    async def wait_known(self) -> tokenizer_pb2.GetTokenizerInfoResponse:
        """Waits for the first answer."""
        await self._known.wait()
        assert self._info is not None
        return self._info

    async def run(self) -> None:
        """Holds the channels and probes every replica, until cancelled."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for index, address in enumerate(self._addresses):
                channel = await stack.enter_async_context(self._channels.open(address, "tokenizer"))
                self._stubs.append(tokenizer_pb2_grpc.TokenizerStub(channel))
                group.create_task(self._probe(index), name=f"probe tokenizer {address}")

    async def encode(self, texts: Sequence[str]) -> list[tokenizer_pb2.TokenizedPrompt]:
        """Token ids and block hashes of each text, with special tokens."""
        request = tokenizer_pb2.EncodeRequest(texts=texts, add_special_tokens=True, want_hashes=True)
        return list((await self._call(lambda stub: stub.Encode(request))).prompts)

    async def encode_chat(self, chat: Chat) -> tokenizer_pb2.TokenizedPrompt:
        """Token ids and block hashes of a rendered conversation."""
        request = tokenizer_pb2.EncodeChatRequest(
            messages_json=chat.messages_json,
            template_kwargs_json=chat.template_kwargs_json,
            add_generation_prompt=chat.add_generation_prompt,
            want_hashes=True,
        )
        return (await self._call(lambda stub: stub.EncodeChat(request))).prompt

    async def _call(self, send: "Callable[[tokenizer_pb2_grpc.TokenizerAsyncStub], Awaitable[T]]") -> T:
        """Each living replica once, beginning with the next in turn; only an unavailable one is passed over.

        The request's own deadline cancels the call from outside.
        """
        self._turn += 1
        candidates = sorted(self._alive) or range(len(self._stubs))
        error: errors.TokenloomError = errors.Unavailable("no tokenizer is connected; try again")
        for step in range(len(candidates)):
            index = candidates[(self._turn + step) % len(candidates)]
            try:
                return await send(self._stubs[index])
            except grpc.aio.AioRpcError as failure:
                error = errors.from_rpc(failure)
                if failure.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise error from failure
                self._alive.discard(index)
        raise error

    async def _probe(self, index: int) -> None:
        while True:
            try:
                info: tokenizer_pb2.GetTokenizerInfoResponse = await self._stubs[index].GetTokenizerInfo(
                    tokenizer_pb2.GetTokenizerInfoRequest(), timeout=PROBE_SECONDS
                )
                self._learn(index, info)
            except grpc.aio.AioRpcError as error:
                if index in self._alive:
                    log.warning("tokenizer %s: %s", self._addresses[index], error.code().name)
                self._alive.discard(index)
            await asyncio.sleep(PROBE_SECONDS if index in self._alive else PROBE_SECONDS / 5)

    def _learn(self, index: int, info: tokenizer_pb2.GetTokenizerInfoResponse) -> None:
        if self._info is None:
            self._info = info
            self._known.set()
        difference = fingerprint_difference(self._info.fingerprint, info.fingerprint)
        if difference is None:
            self._alive.add(index)
        else:
            self._alive.discard(index)
            log.error("tokenizer %s serves something else: %s", self._addresses[index], difference)
