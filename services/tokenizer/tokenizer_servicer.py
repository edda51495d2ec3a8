"""Serves ``Tokenizer``: encodes texts and chats, decodes, and describes the tokenizer.

Short calls run in threads, long ones in processes of their own; at both, tenants take turns.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
from prometheus_client import CollectorRegistry

from tokenloom.request import errors
from tokenloom.request.packed_ids import num_ids
from tokenloom.services.runtime.fair_stage import TURN_CPU_NS, BilledStage, FairStage
from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS
from tokenloom.v1 import types_pb2
from tokenloom.v1.tokenizer_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EncodeChatRequest,
    EncodeChatResponse,
    EncodeRequest,
    EncodeResponse,
    EncodeTranscriptRequest,
    EncodeTranscriptResponse,
    GetTokenizerInfoRequest,
    GetTokenizerInfoResponse,
    TokenizedPrompt,
)
from tokenloom.v1.tokenizer_pb2_grpc import TokenizerServicer as TokenizerServicerBase
from tokenloom.v1.tokenizer_pb2_grpc import add_TokenizerServicer_to_server
from tokenloom.v1.types_pb2 import MediaItem

from .encode_worker import EncodeJob
from .encoder import TextEncoder
from .long_texts import CHUNKED_CHARS, SHORT_BYTES, LongTexts, RunInThread
from .render_worker import RenderJob
from .renderer import Renderer
from .spelled_tokens import Rendered

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

    from .media.media_reader import MediaReader
    from .media.transcript_prompts import TranscriptPrompts

_Context = grpc.aio.ServicerContext[Any, Any]

_CALL_BYTES = 4000
"""So many bytes of a text cost this process as much as a call: 0.7 ms, with the chat template."""
MAX_WAITING = 1024
"""Short calls that wait; more are refused with an error that invites a retry."""
MAX_LONG_WAITING = 256
MAX_LONG_BYTES = 128 << 20
"""Of the long calls that run and wait, which is about what they take of the memory. A process takes more for the one
that it encodes."""


class TokenizerMetrics:
    """Counts tokens, and measures the calls that were answered, by method.

    Attributes:
        bill: Shares the CPU time of this process out to calls; None without ``--bill``.
    """

    def __init__(self, registry: CollectorRegistry, bill: "CpuBill | None" = None) -> None:
        self.bill = bill
        name = "tokenloom_tokenizer_"
        self.tokens = Counter(registry, name + "tokens", "Tokens that encoding made or that were decoded.", {})
        self.cached_tokens = Counter(
            registry, name + "cached_tokens", "Tokens of long texts whose ids were kept from an earlier text.", {}
        )
        self.encode, self.encode_chat, self.decode = (
            Histogram(
                registry, f"{name}{method}_seconds", f"Seconds that a call of {method} took.", {}, LATENCY_SECONDS
            )
            for method in ("encode", "encode_chat", "decode")
        )


class TokenizerServicer(TokenizerServicerBase):
    """Answers calls without state: any replica can answer, and any call may be retried.

    Each call takes a turn of its tenant's before anything is spent on it, and is charged by its bytes.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        renderer: Renderer | None,
        long_texts: LongTexts,
        info: GetTokenizerInfoResponse,
        metrics: TokenizerMetrics,
        num_threads: int,
        reader: "MediaReader | None" = None,
        transcripts: "TranscriptPrompts | None" = None,
    ) -> None:
        """``renderer``: None when the model has no chat template. ``num_threads``: and as many long calls at a time.
        ``reader``: of images or sounds; None when the model reads none. ``transcripts``: None when it does not
        transcribe."""
        self._encoder = encoder
        self._renderer = renderer
        self._long_texts = long_texts
        self._processes = long_texts.processes
        self._info = info
        self._metrics = metrics
        self._reader = reader
        self._transcripts = transcripts
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        # Of its own: behind two texts of 4 MB, which take 50 ms there, a short one waited. And only one, because each
        # thread that computes lets the event loop wait for the interpreter's lock.
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        stage = FairStage if metrics.bill is None else partial(BilledStage, metrics.bill, _CALL_BYTES)
        self._short = stage(
            num_threads, "texts", max_waiting=MAX_WAITING, max_cost=MAX_WAITING * SHORT_BYTES, leaves_spare=True
        )
        self._long = stage(
            num_threads, "long texts", max_waiting=MAX_LONG_WAITING, max_cost=MAX_LONG_BYTES, leaves_spare=True
        )

    @property
    def bills(self) -> bool:
        """Whether responses say what their calls have cost."""
        return self._metrics.bill is not None

    async def Encode(  # type: ignore[override]
        self, request: EncodeRequest, context: _Context
    ) -> EncodeResponse | bytes:
        started, size = time.monotonic(), request.ByteSize() + 1
        stage = self._short if size <= SHORT_BYTES else self._long
        response: EncodeResponse | bytes
        await stage.begin(request.tenant, size)
        try:
            found = None
            if size > CHUNKED_CHARS and _is_one_text(request) and len(text := request.texts[0]) > CHUNKED_CHARS:
                special, rest = request.add_special_tokens, TokenizedPrompt()
                found = await self._long_texts.encode(text, request, self._run_in(stage), rest, special=special)
            if found is not None:
                response, num_tokens = found
            elif stage is self._short:
                run = asyncio.get_running_loop().run_in_executor
                response = await run(self._threads, self._encoder.encode, request)
                num_tokens = sum(map(num_ids, response.prompts))
            else:
                run_long = self._run_in(stage)
                job = EncodeJob(await run_long(request.SerializeToString))
                reply = await self._processes.run(job, run_long)
                response, num_tokens = reply.response, reply.num_tokens
        finally:
            stage.end(request.tenant, size)
        self._metrics.encode.observe(time.monotonic() - started)
        self._metrics.tokens.inc(num_tokens)
        return response

    async def EncodeChat(  # type: ignore[override]
        self, request: EncodeChatRequest, context: _Context
    ) -> EncodeChatResponse | bytes:
        if request.token_ids:
            return await self._place_media(request)
        if self._renderer is None:
            raise errors.InvalidArgument("This model has no chat template; send a plain prompt instead.", "messages")
        started, size = time.monotonic(), request.ByteSize() + 1
        stage = self._short if size <= SHORT_BYTES else self._long
        await stage.begin(request.tenant, size)
        try:
            rendered, media = await self._renderer.render(_job(request)), list[MediaItem]()
            if request.media:
                if self._reader is None:
                    raise errors.InvalidArgument("messages: this model reads text only", "messages")
                text, media = self._reader.expand(rendered.text, request.media, request.cache_salt)
                rendered = replace(rendered, text=text)
            start = getattr(types_pb2, f"REASONING_START_{rendered.reasoning_start}")
            response: EncodeChatResponse | bytes
            found = None
            if len(rendered.text) > CHUNKED_CHARS and not rendered.masks and not media:
                rest = TokenizedPrompt(reasoning_start=start)
                found = await self._long_texts.encode(rendered.text, request, self._run_in(stage), rest)
            if found is not None:
                response, num_tokens = found
            elif len(rendered.text) <= SHORT_BYTES:
                run = asyncio.get_running_loop().run_in_executor
                prompt = await run(self._threads, self._encoder.encode_chat, rendered, request, media)
                prompt.reasoning_start = start
                response, num_tokens = EncodeChatResponse(prompt=prompt), len(prompt.token_ids) or num_ids(prompt)
            else:
                job = _encode_job(request, rendered, media, start)
                reply = await self._processes.run(job, self._run_in(stage))
                response, num_tokens = reply.response, reply.num_tokens
        finally:
            stage.end(request.tenant, size)
        self._metrics.encode_chat.observe(time.monotonic() - started)
        self._metrics.tokens.inc(num_tokens)
        return response

    async def _place_media(self, request: EncodeChatRequest) -> EncodeChatResponse:
        """Return the ids of a conversation that was rendered before, with the places of its media."""
        if self._reader is None or not request.media:
            raise errors.InvalidArgument("token_ids: this model reads text only, or there is no image", "token_ids")
        size = request.ByteSize() + 1
        stage = self._short if size <= SHORT_BYTES else self._long
        await stage.begin(request.tenant, size)
        try:
            run = asyncio.get_running_loop().run_in_executor
            prompt = await run(self._threads, self._encoder.place, request)
        finally:
            stage.end(request.tenant, size)
        return EncodeChatResponse(prompt=prompt)

    async def EncodeTranscript(self, request: EncodeTranscriptRequest, context: _Context) -> EncodeTranscriptResponse:
        if self._transcripts is None:
            raise errors.InvalidArgument("This model does not transcribe sounds.", "model")
        size = request.ByteSize() + 1
        if size > SHORT_BYTES:
            raise errors.InvalidArgument(f"prompt: a text may have at most {SHORT_BYTES} bytes here.", "prompt")
        await self._short.begin(request.tenant, size)
        try:
            run = asyncio.get_running_loop().run_in_executor
            prompt = await run(self._threads, self._transcripts.encode, request)
        finally:
            self._short.end(request.tenant, size)
        self._metrics.tokens.inc(len(prompt.token_ids))
        return EncodeTranscriptResponse(prompt=prompt)

    async def Decode(  # type: ignore[override]
        self, request: DecodeRequest, context: _Context
    ) -> DecodeResponse | bytes:
        started, size = time.monotonic(), request.ByteSize() + 1
        stage = self._short if size <= SHORT_BYTES else self._long
        response: DecodeResponse | bytes
        await stage.begin(request.tenant, size)
        try:
            if stage is self._short:
                run = asyncio.get_running_loop().run_in_executor
                response = await run(self._threads, self._encoder.decode, request)
            else:
                run_long = self._run_in(stage)
                job = EncodeJob(await run_long(request.SerializeToString), decodes=True)
                response = (await self._processes.run(job, run_long)).response
        finally:
            stage.end(request.tenant, size)
        self._metrics.decode.observe(time.monotonic() - started)
        self._metrics.tokens.inc(len(request.token_ids))
        return response

    def _run_in(self, stage: FairStage) -> RunInThread:
        """Return what runs functions in a thread for the texts of this stage."""
        threads = self._threads if stage is self._short else self._long_thread
        return partial(asyncio.get_running_loop().run_in_executor, threads)

    async def close(self) -> None:
        """Let running calls end, and drop the waiting ones."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._long_texts.close()

    async def GetTokenizerInfo(self, request: GetTokenizerInfoRequest, context: _Context) -> GetTokenizerInfoResponse:
        return self._info


class _Sending:
    """Adds a servicer to a server. Its responses may be bytes, which are sent as they are: the process that encodes a
    long text, or a thread, has made them."""

    def __init__(self, server: Any, *, says_cost: bool) -> None:
        self._server = server
        self._says_cost = says_cost

    def add_registered_method_handlers(
        self, service: str, handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Called by generated code."""
        sending = {name: _sent_as_it_is(handler, says_cost=self._says_cost) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, sending)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Do nothing: generated code passes the same handlers by name too."""


def add_servicer(servicer: TokenizerServicer, server: Any) -> None:
    """Add the servicer, as generated code does."""
    sending: Any = _Sending(server, says_cost=servicer.bills)
    add_TokenizerServicer_to_server(servicer, sending)


def _sent_as_it_is(handler: "grpc.RpcMethodHandler[Any, Any]", *, says_cost: bool) -> "grpc.RpcMethodHandler[Any, Any]":
    serialize: Any = handler.response_serializer
    behaviour: Any = handler.unary_unary

    def send(response: Any) -> bytes:
        return response if type(response) is bytes else serialize(response)

    async def answer(request: Any, context: _Context) -> bytes:
        data = send(await behaviour(request, context))
        # All responses of calls that take turns have this field under the same number.
        return data + EncodeResponse(cpu_ns=spent).SerializeToString() if (spent := TURN_CPU_NS.get()) else data

    method = answer if says_cost else behaviour
    return grpc.unary_unary_rpc_method_handler(method, handler.request_deserializer, send)


def _is_one_text(request: EncodeRequest) -> bool:
    """Return whether a call asks for all of the ids of one text."""
    is_other = request.second_texts or request.max_tokens or request.HasField("prompt_name")
    return len(request.texts) == 1 and not is_other


def _encode_job(
    request: EncodeChatRequest, rendered: Rendered, media: Sequence[MediaItem], reasoning_start: int
) -> EncodeJob:
    wishes = EncodeChatRequest(
        want_hashes=request.want_hashes,
        cache_salt=request.cache_salt,
        want_token_strings=request.want_token_strings,
        takes_packed_ids=request.takes_packed_ids,
    )
    items = [item.SerializeToString() for item in media]
    return EncodeJob(wishes.SerializeToString(), rendered.text, dict(rendered.masks), items, reasoning_start)


def _job(request: EncodeChatRequest) -> RenderJob:
    texts = []
    for field, data in (
        ("messages", request.messages_json),
        ("tools", request.tools_json),
        ("chat_template_kwargs", request.template_kwargs_json),
    ):
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise errors.InvalidArgument(f"{field} is not UTF-8.", field) from None
    messages, tools, template_kwargs = texts
    return RenderJob(
        messages_json=messages,
        tools_json=tools,
        template_kwargs_json=template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
