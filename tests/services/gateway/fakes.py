"""The mesh behind a gateway, in one process and under a test's control."""

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from tests.loop_clock import pass_time
from tests.plain_text import PLAIN_TEXT
from tests.ready_channel import ready_channel
from tokenloom.request import errors, packed_ids, wire_errors
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.host.listener import SERVER_OPTIONS
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.local_streams.socket_end import status
from tokenloom.services.runtime.peers import hello
from tokenloom.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    inference_pb2_grpc,
    output_processor_pb2,
    output_processor_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)

MODEL = "fake"
FINGERPRINT = types_pb2.Fingerprint(model=MODEL, tokenizer=b"t" * 32)
LIMITS = types_pb2.ModelLimits(max_model_len=512, vocab_size=256)
BLOCK_SIZE = 16
WEIGHT_BYTES = 1000
EOS = 255
HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
"""Of a request that a test writes by hand."""
SOON = 30.0
"""Bound of every wait: a hang is a failure."""


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """A byte is a token."""

    def __init__(self) -> None:
        self.unavailable = False
        self.error: errors.TokenloomError | None = None  # of all calls
        self.tells = asyncio.Event()
        self.tells.set()
        self.fingerprint = types_pb2.Fingerprint()
        self.fingerprint.CopyFrom(FINGERPRINT)
        self.eos_token_ids = [EOS]
        self.defaults = types_pb2.SamplingParams(top_k=7)
        self.reasoning_start = types_pb2.REASONING_START_UNSPECIFIED
        self.tool_call_parser = self.reasoning_parser = ""
        self.special_marks: Sequence[str] = ()
        self.tool_format_json = b""
        self.max_sentence_tokens = self.skipped_tokens = 0
        self.media_kinds: Sequence[types_pb2.MediaKind] = ()
        self.vocab_size = 256
        self.transcript: tokenizer_pb2.TranscriptTraits | None = None
        self.transcripts: list[tokenizer_pb2.EncodeTranscriptRequest] = []
        self.make_transcript: (
            Callable[[tokenizer_pb2.EncodeTranscriptRequest], tokenizer_pb2.TokenizedPrompt] | None
        ) = None
        self.calls = 0
        self.chats: list[tokenizer_pb2.EncodeChatRequest] = []
        self.prompts: list[tokenizer_pb2.EncodeRequest] = []

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Any) -> tokenizer_pb2.EncodeResponse:
        await self._count(context)
        self.prompts.append(request)
        prompts = [self._prompt(text.encode(), request) for text in request.texts]
        for prompt, second in zip(prompts, request.second_texts, strict=False):
            prompt.first_part_tokens = len(prompt.token_ids)
            prompt.token_ids.extend(second.encode())
        for prompt in prompts if request.max_tokens else ():
            cut = len(prompt.token_ids) - request.max_tokens
            del prompt.token_ids[slice(request.max_tokens, None) if request.keep_first else slice(max(cut, 0))]
        return tokenizer_pb2.EncodeResponse(prompts=prompts)

    async def EncodeChat(self, request: tokenizer_pb2.EncodeChatRequest, context: Any) -> Any:
        await self._count(context)
        self.chats.append(request)
        prompt = self._prompt(bytes(request.token_ids) or request.messages_json, request)
        for index, size in enumerate(request.media):  # two tokens each, from the beginning
            run = types_pb2.MediaRun(position=2 * index, num_tokens=2)
            prompt.media.add(
                key=size.digest,
                kind=size.kind,
                num_rows=2,
                levels=1,
                runs=[run],
                encoder=size.encoder,
                digest=size.digest,
                options_json=size.options_json,
                index=index,
                num_in_prompt=len(request.media),
            )
        return tokenizer_pb2.EncodeChatResponse(prompt=prompt)

    async def EncodeTranscript(self, request: tokenizer_pb2.EncodeTranscriptRequest, context: Any) -> Any:
        """The prompt is the text before, the language and the task, each byte a token."""
        await self._count(context)
        self.transcripts.append(request)
        if self.make_transcript is not None:
            return tokenizer_pb2.EncodeTranscriptResponse(prompt=self.make_transcript(request))
        text = f"{request.previous_text}^{request.language}{request.task or ''}"
        prompt = tokenizer_pb2.TokenizedPrompt(token_ids=text.encode())
        options = b"%d+%d" % (request.start, request.samples)
        prompt.media.add(
            key=options,
            kind=request.sound.kind,
            num_rows=1500,
            levels=1,
            encoder=request.sound.encoder,
            digest=request.sound.digest,
            options_json=options,
            num_in_prompt=1,
        )
        return tokenizer_pb2.EncodeTranscriptResponse(prompt=prompt)

    async def Decode(self, request: tokenizer_pb2.DecodeRequest, context: Any) -> tokenizer_pb2.DecodeResponse:
        return tokenizer_pb2.DecodeResponse(text=bytes(request.token_ids).decode())

    async def GetTokenizerInfo(self, request: Any, context: Any) -> tokenizer_pb2.GetTokenizerInfoResponse:
        await self.tells.wait()
        return tokenizer_pb2.GetTokenizerInfoResponse(
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            has_chat_template=True,
            default_sampling_params=self.defaults,
            max_token_bytes=1,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            special_marks=self.special_marks,
            tool_format_json=self.tool_format_json,
            max_sentence_tokens=self.max_sentence_tokens,
            media_kinds=self.media_kinds,
            transcript=self.transcript,
        )

    async def _count(self, context: Any) -> None:
        self.calls += 1
        if self.unavailable:
            await wire_errors.abort(context, errors.Unavailable("the fake tokenizer is away"))
        if self.error is not None:
            await wire_errors.abort(context, self.error)

    def _prompt(
        self, data: bytes, request: tokenizer_pb2.EncodeRequest | tokenizer_pb2.EncodeChatRequest
    ) -> tokenizer_pb2.TokenizedPrompt:
        """Its one block hash is the sum of its bytes and of the salt's."""
        hashes = [sum(data) + sum(request.cache_salt)] if request.want_hashes else []
        strings = map(chr, data) if request.want_token_strings else ()
        is_packed = request.takes_packed_ids and len(data) > packed_ids.LONG_PROMPT
        return tokenizer_pb2.TokenizedPrompt(
            token_ids=b"" if is_packed else data,
            packed_token_ids=packed_ids.pack(data) if is_packed else b"",
            block_hash_prefixes=hashes,
            token_strings=strings,
            reasoning_start=self.reasoning_start,
            skipped_tokens=self.skipped_tokens,
        )


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Knows one engine, or those that the test names, in whatever state the test says."""

    def __init__(self) -> None:
        self.state = coordinator_pb2.ENGINE_STATE_SERVING
        self.engines: Sequence[str] = ["engine-0"]
        self.limits = LIMITS
        self.is_away = False
        self.position = coordinator_pb2.Position(index=0, count=1)  # of every gateway
        self.report = coordinator_pb2.EngineReport(running=3, waiting=2, kv_usage=0.25)
        self.placement = coordinator_pb2.PlacementRule.PLACEMENT_RULE_SCORE
        self.addresses: dict[str, str] = {}
        self.encoders: dict[str, str] = {}  # addresses by name
        self.draining_encoders: set[str] = set()
        self.adapters: dict[str, types_pb2.Adapter] = {}
        self.failures: list[errors.TokenloomError] = []  # of the next calls of SetAdapter
        self.taken_over: list[types_pb2.Adapter] = []  # what a restarted coordinator has after an unload
        self._changed = asyncio.Condition()
        self._num_changes = 0

    async def set_state(self, state: coordinator_pb2.EngineState) -> None:
        async with self._changed:
            self.state = state
            self._notify()

    async def set_engines(self, *names: str) -> None:
        async with self._changed:
            self.engines = names
            self._notify()

    async def set_encoders(self, **addresses: str) -> None:
        async with self._changed:
            self.encoders = addresses
            self._notify()

    async def drain_encoder(self, name: str) -> None:
        async with self._changed:
            self.draining_encoders.add(name)
            self._notify()

    async def set_away(self, is_away: bool) -> None:
        async with self._changed:
            self.is_away = is_away
            self._notify()

    async def Enroll(self, request: coordinator_pb2.EnrollRequest, context: Any) -> Any:
        assert request.service == "gateway"
        yield self.position
        await asyncio.Event().wait()

    async def SetAdapter(self, request: coordinator_pb2.SetAdapterRequest, context: Any) -> Any:
        if self.failures:
            await wire_errors.abort(context, self.failures.pop())
        async with self._changed:
            self.adapters.pop(request.adapter.name, None)
            if not request.unloaded:
                self.adapters[request.adapter.name] = request.adapter
            elif self.taken_over:
                self.adapters[request.adapter.name] = self.taken_over.pop()
            self._notify()
        return coordinator_pb2.SetAdapterResponse()

    async def _changed_since(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_changes != seen)

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[coordinator_pb2.Snapshot]:
        while True:
            if self.is_away:
                await wire_errors.abort(context, errors.Unavailable("the fake coordinator is away"))
            seen = self._num_changes  # what changes while the snapshot is sent needs another one
            entries = [self._entry(name) for name in self.engines]
            yield coordinator_pb2.Snapshot(
                complete=True,
                engines=entries,
                encoders=[
                    _encoder_entry(name, address, is_draining=name in self.draining_encoders)
                    for name, address in self.encoders.items()
                ],
                adapters=self.adapters.values(),
                placement=self.placement,
            )
            await self._changed_since(seen)

    def _entry(self, name: str) -> coordinator_pb2.EngineEntry:
        identity = coordinator_pb2.EngineIdentity(
            engine_id=name,
            address=self.addresses.get(name, ""),
            fingerprint=FINGERPRINT,
            limits=self.limits,
            num_kv_blocks=64,
            weight_bytes=WEIGHT_BYTES,
        )
        identity.fingerprint.block_size = BLOCK_SIZE
        entry = coordinator_pb2.EngineEntry(identity=identity, report=self.report, score=11)
        if self.placement == coordinator_pb2.PlacementRule.PLACEMENT_RULE_COST:
            entry.uncached_tokens, entry.uncached_tokens_per_second, entry.expected_seconds = 1200, 9600.0, 0.125
        entry.report.state = self.state
        return entry


def _encoder_entry(name: str, address: str, *, is_draining: bool) -> coordinator_pb2.EngineEntry:
    state = coordinator_pb2.ENGINE_STATE_DRAINING if is_draining else coordinator_pb2.ENGINE_STATE_SERVING
    report = coordinator_pb2.EngineReport(role=types_pb2.ENGINE_ROLE_ENCODE, state=state)
    identity = coordinator_pb2.EngineIdentity(engine_id=name, address=address, fingerprint=FINGERPRINT)
    return coordinator_pb2.EngineEntry(identity=identity, report=report)


class FakeRequest:
    """A request as the fake output processor sees it."""

    def __init__(self, session: "FakeSession", submit: output_processor_pb2.Submit) -> None:
        self.submit = submit
        self.cancelled = asyncio.Event()
        self._session = session
        self._num_tokens = [0] * (submit.num_samples or 1)
        for journal in submit.journals:
            self._num_tokens[journal.sample_index] = len(journal.token_ids)

    def send(self, text: str, token_ids: Sequence[int], sample_index: int = 0) -> None:
        """A frame with some output."""
        frame = output_processor_pb2.ProcessFrame(
            slot=[self.submit.slot],
            text=[text],
            token_index=[self._num_tokens[sample_index]],
            num_tokens=[len(token_ids)],
            token_ids=token_ids,
            sample_index=[sample_index],
        )
        self._num_tokens[sample_index] += len(token_ids)
        self._session.frames.put_nowait(frame)

    def finish(
        self,
        reason: int = types_pb2.FINISH_REASON_STOP,
        stop_reason: str = "",
        sample_index: int = 0,
        routed_experts: types_pb2.RoutedExperts | None = None,
        timeline: types_pb2.Timeline | None = None,
        weights_version: str = "",
    ) -> None:
        finished = output_processor_pb2.RequestFinished(
            slot=self.submit.slot,
            reason=reason,  # type: ignore[arg-type]
            stop_reason=stop_reason,
            sample_index=sample_index,
            prompt_tokens=len(self.submit.prompt.token_ids),
            completion_tokens=self._num_tokens[sample_index],
            cached_tokens=1,
            attempts=1,
            timeline=timeline or types_pb2.Timeline(queued_ns=2_000_000, prefill_engine="engine-0"),
            routed_experts=routed_experts,
            weights_version=weights_version,
        )
        self._session.frames.put_nowait(output_processor_pb2.ProcessFrame(finished=[finished]))

    def pool(self, values: Sequence[float], shape: Sequence[int] | None = None, offset: int = 0) -> None:
        """A frame with a result, or a part of it."""
        data = struct.pack(f"<{len(values)}f", *values)
        shape = [len(values)] if shape is None else shape
        part = types_pb2.Pooled(slot=self.submit.slot, shape=shape, offset=offset, data=data)
        self._session.frames.put_nowait(output_processor_pb2.ProcessFrame(pooled=[part]))

    def fail(self, error: errors.TokenloomError) -> None:
        finished = output_processor_pb2.RequestFinished(
            slot=self.submit.slot, reason=types_pb2.FINISH_REASON_ERROR, error=wire_errors.to_proto(error)
        )
        self._session.frames.put_nowait(output_processor_pb2.ProcessFrame(finished=[finished]))

    def answer(self, *pieces: str, reason: int = types_pb2.FINISH_REASON_STOP, stop_reason: str = "") -> None:
        """Sends each piece with one token a character, as far as the request may have tokens, then finishes; in each
        sample."""
        most = self.submit.sampling_params.max_tokens or sys.maxsize
        for sample_index in range(len(self._num_tokens)):
            for piece in pieces:
                token_ids = [ord(c) % 256 for c in piece[: most - self._num_tokens[sample_index]]]
                self.send(piece, token_ids, sample_index)
            self.finish(reason, stop_reason, sample_index)


class FakeSession:
    """One ``Process`` stream."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[output_processor_pb2.ProcessFrame | grpc.aio.AioRpcError | None] = asyncio.Queue()
        self.requests: dict[int, FakeRequest] = {}
        self.beating = True
        self.credit = 0

    def end(self) -> None:
        self.frames.put_nowait(None)

    def lose(self, details: str) -> None:
        """The transport gives the connection up, for this reason."""
        self.frames.put_nowait(status(grpc.StatusCode.UNAVAILABLE, details))


class FakeOutputProcessor(output_processor_pb2_grpc.OutputProcessorServicer):
    """Hands requests to the test; ``auto`` answers them by itself."""

    def __init__(self) -> None:
        self.epoch = 1
        self.sessions: list[FakeSession] = []
        self.requests: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self.resumes: asyncio.Queue[tuple[FakeRequest, output_processor_pb2.Resume]] = asyncio.Queue()
        self.withdrawals: asyncio.Queue[output_processor_pb2.Withdrawal] = asyncio.Queue()
        self.auto: Sequence[str] | None = None
        self.pool: Callable[[FakeRequest], object] | None = None  # answers pooling requests
        self.recalled: dict[str, output_processor_pb2.RecallResponse] = {}  # by request
        self.begun: set[str] = set()  # the requests that it has read, of which no other gateway knows enough
        self.recall_fails = False  # as that of one whose machine swaps

    async def Detokenize(
        self, request: output_processor_pb2.DetokenizeRequest, context: Any
    ) -> output_processor_pb2.DetokenizeResponse:
        """A byte is a token, as for the fake tokenizer."""
        text = bytes(request.token_ids).decode(errors="replace")
        singles = [bytes([each]) for each in request.single_ids]
        return output_processor_pb2.DetokenizeResponse(text=text, single_bytes=singles)

    async def Recall(
        self, request: output_processor_pb2.RecallRequest, context: Any
    ) -> output_processor_pb2.RecallResponse:
        if self.recall_fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        if (found := self.recalled.get(request.request_id)) is None and request.request_id not in self.begun:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not known")
        return found or output_processor_pb2.RecallResponse()

    async def Process(self, messages: Any, context: Any) -> AsyncIterator[output_processor_pb2.ProcessFrame]:
        session = FakeSession()
        reader = asyncio.create_task(self._read(session, messages))
        self.sessions.append(session)
        try:
            yield output_processor_pb2.ProcessFrame(hello=hello.make_hello("op", self.epoch, fingerprint=FINGERPRINT))
            while True:
                try:
                    async with asyncio.timeout(hello.HEARTBEAT_SECONDS):
                        frame = await session.frames.get()
                except TimeoutError:
                    if session.beating:
                        yield output_processor_pb2.ProcessFrame()
                    continue
                if frame is None:
                    return
                if isinstance(frame, grpc.aio.AioRpcError):
                    await context.abort(frame.code(), frame.details() or "")
                yield frame
        finally:
            reader.cancel()
            for request in session.requests.values():
                request.cancelled.set()

    async def next_request(self) -> FakeRequest:
        return await asyncio.wait_for(self.requests.get(), SOON)

    async def next_resume(self) -> "tuple[FakeRequest, output_processor_pb2.Resume]":
        """The next request that a client resumes, and how the gateway asked for it."""
        return await asyncio.wait_for(self.resumes.get(), SOON)

    async def answers_unknown(self, call: "asyncio.Task[Any]") -> None:
        """Answer that a request is not known as often as the gateway asks for it, until the client's call has ended."""
        while True:
            asked = asyncio.create_task(self.next_resume())
            await asyncio.wait((asked, call), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                asked.cancel()
                return
            asked.result()[0].fail(errors.RequestLost("The request is not known."))
            pass_time(1.0)

    async def next_withdrawal(self) -> output_processor_pb2.Withdrawal:
        """The next request without a slot that a client has cancelled."""
        return await asyncio.wait_for(self.withdrawals.get(), SOON)

    async def _read(self, session: FakeSession, messages: Any) -> None:
        async for message in messages:
            session.credit += message.credit or message.hello.initial_credit
            for submit in message.submit:
                request = session.requests[submit.slot] = FakeRequest(session, submit)
                self.begun.add(submit.request_id)
                if self.pool is not None and submit.HasField("pooling_params"):
                    self.pool(request)
                elif self.auto is None:
                    self.requests.put_nowait(request)
                else:
                    request.answer(*self.auto)
            for resume in message.resume:
                submit = output_processor_pb2.Submit(slot=resume.slot, request_id=resume.request_id)
                request = session.requests[resume.slot] = FakeRequest(session, submit)
                self.resumes.put_nowait((request, resume))
            for withdrawal in message.withdraw:
                self.withdrawals.put_nowait(withdrawal)
            for slot in message.cancel_slots:
                session.requests[slot].cancelled.set()


class FakeMesh:
    """All of it, and the gateway in front."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = FakeTokenizer()
        self.second_tokenizer = FakeTokenizer()
        self.coordinator = FakeCoordinator()
        self.outputs = FakeOutputProcessor()
        self.second_outputs = FakeOutputProcessor()
        self.service: GatewayService | None = None
        self.grpc_address = ""
        self.seconds: float | None = 60.0  # a test that lasts longer hangs

    @property
    def http_address(self) -> str:
        assert self.service is not None
        return self.service.http_address

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[None]:
        main, second = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server(options=SERVER_OPTIONS)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self.tokenizer, main)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self.second_tokenizer, second)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.coordinator, main)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(self.outputs, main)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(self.second_outputs, second)
        main.add_insecure_port(self.address("mesh"))
        second.add_insecure_port(self.address("second"))
        await main.start()
        await second.start()
        try:
            yield
        finally:
            await main.stop(0)
            await second.stop(0)

    @asynccontextmanager
    async def gateway(self, **settings: Any) -> AsyncIterator["FakeMesh"]:
        values: dict[str, Any] = {
            "listen": self.address("grpc"),
            "http_listen": "127.0.0.1:0",
            "metrics_listen": "",
            "tokenizers": (self.address("mesh"), self.address("second")),
            "output_processors": (self.address("mesh"),),
            "coordinator": self.address("mesh"),
            "drain_timeout": 1.0,
        }
        gateway_settings = GatewaySettings.of(**(values | settings))
        self.service = GatewayService(gateway_settings)
        async with self.servers(), asyncio.timeout(self.seconds), running(self.service, gateway_settings) as host:
            self.grpc_address = host.address
            yield self

    def address(self, name: str) -> str:
        return f"unix:{self.directory}/{name}"

    def http(self, **options: Any) -> httpx.AsyncClient:
        address = f"http://{self.http_address}"
        return httpx.AsyncClient(**{"base_url": address, "timeout": SOON, "verify": PLAIN_TEXT, **options})

    @asynccontextmanager
    async def inference(self) -> "AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]":
        async with ready_channel(self.grpc_address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)
