"""Sends requests with the Python client of the mesh, over the gateways' public gRPC API."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.client import AsyncClient, Logprob, Retries, errors

from . import failure
from .answer import Answer, Sample
from .exchange import Exchange

_MAX_RETRIES = 100
"""Of one request: its deadline ends it. A gateway of a busy machine may take a minute to start."""
_AGAIN_SECONDS = 1.0
"""After which a session whose gateway is away is opened again."""


class GrpcClient:
    """Holds one client for each gateway; each retries until the deadline, and resumes as it does for its users."""

    name = "gRPC client"
    transport = "grpc"
    resumes = True
    moves = False
    is_special = False

    def __init__(self, gateways: Sequence[str]) -> None:
        """``gateways``: their gRPC addresses."""
        self._clients = [AsyncClient(address, retries=Retries(_MAX_RETRIES)) for address in gateways]

    async def send(self, exchange: Exchange) -> None:
        try:
            if exchange.case.streamed:
                await self._stream(exchange)
            else:
                await self._generate(exchange)
        except errors.TokenloomError as error:
            raise failure.typed(type(error).__name__, error.message) from None

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _stream(self, exchange: Exchange) -> None:
        case, client, loop = exchange.case, self._clients[exchange.gateway], asyncio.get_running_loop()
        if case.is_chat:
            stream = await client.stream_chat(_messages(exchange), timeout=exchange.seconds, **case.options)
        else:
            stream = await client.stream(_prompt(exchange), timeout=exchange.seconds, **case.options)
        answer = exchange.answer
        async with stream:
            async for chunk in stream:
                sample = answer.sample(chunk.index)
                sample.token_ids += chunk.token_ids
                sample.text += chunk.text
                sample.logprobs += _logprobs(chunk.token_ids, chunk.logprobs)
                sample.finish_reason = chunk.finish_reason or sample.finish_reason
                sample.stop_reason = chunk.stop_reason if chunk.finish_reason else sample.stop_reason
                for delta in chunk.tool_calls:
                    _add_call(sample, delta.index, delta.name, delta.arguments)
                if chunk.usage is not None:
                    answer.completion_tokens = chunk.usage.completion_tokens
                if chunk.token_ids:
                    exchange.progress.output(loop.time())
        _check_ends(answer)

    async def _generate(self, exchange: Exchange) -> None:
        case, client = exchange.case, self._clients[exchange.gateway]
        if case.is_chat:
            whole = await client.chat(_messages(exchange), timeout=exchange.seconds, **case.options)
        else:
            whole = await client.generate(_prompt(exchange), timeout=exchange.seconds, **case.options)
        exchange.answer.completion_tokens = whole.usage.completion_tokens
        for output in whole.outputs:
            exchange.answer.samples[output.index] = Sample(
                token_ids=list(output.token_ids),
                text=output.text,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=_logprobs(output.token_ids, output.logprobs),
                tool_calls=[[call.name, call.arguments] for call in output.tool_calls],
            )


class GrpcTranscriptClient:
    """Has sounds transcribed with one client for each gateway, which sends a sound again while its gateway is away."""

    name = "gRPC transcripts"
    transport = "gRPC transcripts"
    resumes = True
    moves = False
    is_special = True

    def __init__(self, gateways: Sequence[str]) -> None:
        """``gateways``: their gRPC addresses."""
        self._clients = [AsyncClient(address) for address in gateways]

    async def send(self, exchange: Exchange) -> None:
        options, client = exchange.case.options, self._clients[exchange.gateway]
        try:
            found = await client.transcribe(options["file"], timeout=exchange.seconds, **options["fields"])
        except errors.TokenloomError as error:
            raise failure.typed(type(error).__name__, error.message) from None
        exchange.answer.sample(0).text = repr(found)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class SessionClient:
    """Continues one prompt over several turns. Its gateway holds the session: with it, the session is lost, unless no
    turn has been answered yet."""

    name = "gRPC session"
    transport = "session"
    resumes = False
    moves = False
    is_special = True

    def __init__(self, gateways: Sequence[str]) -> None:
        """``gateways``: their gRPC addresses."""
        self._clients = [AsyncClient(address) for address in gateways]

    async def send(self, exchange: Exchange) -> None:
        began = time.monotonic()
        while True:
            try:
                return await self._turns(exchange, exchange.seconds - (time.monotonic() - began))
            except errors.Unavailable as error:
                # Its gateway was away for longer than an attempt to connect takes: no turn was lost, as none had begun.
                if exchange.answer.samples or time.monotonic() - began + _AGAIN_SECONDS > exchange.seconds:
                    raise failure.typed(type(error).__name__, error.message) from None
                await asyncio.sleep(_AGAIN_SECONDS)
            except errors.TokenloomError as error:
                raise failure.typed(type(error).__name__, error.message) from None

    async def _turns(self, exchange: Exchange, seconds: float) -> None:
        options = dict(exchange.case.options)
        async with self._clients[exchange.gateway].session(timeout=seconds) as session:
            for number, turn in enumerate(options.pop("turns")):
                whole = await session.generate(turn, **options)
                (output,) = whole.outputs
                exchange.answer.samples[number] = Sample(
                    token_ids=list(output.token_ids), text=output.text, finish_reason=output.finish_reason
                )

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def _check_ends(answer: Answer) -> None:
    """Raise ``RequestFailed`` for a stream that ended, without an error, before its last chunk."""
    if answer.completion_tokens is None:
        raise failure.cut("the stream ended without its usage")


def _prompt(exchange: Exchange) -> str | list[int]:
    assert exchange.case.prompt is not None
    return exchange.case.prompt


def _messages(exchange: Exchange) -> Any:
    return list(exchange.case.messages)


def _logprobs(token_ids: Sequence[int], found: Sequence[Mapping[int, Logprob]] | None) -> list[float]:
    return [each[token_id].logprob for token_id, each in zip(token_ids, found or (), strict=False)]


def _add_call(sample: Sample, index: int, name: str, arguments: str) -> None:
    if index == len(sample.tool_calls):
        sample.tool_calls.append([name, ""])
    sample.tool_calls[index][1] += arguments
