"""A tokenizer whose texts are token ids. The processes that render for it are killed, stopped, or do not start."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.tokenizer.render_worker import RenderJob, RenderReply, RenderSetup
from tokenloom.services.tokenizer.renderer import Renderer, RenderProcess
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, Fingerprint

from .encoders import expand
from .reference import VOCAB_SIZE

START_SECONDS = 0.25
RENDER_SECONDS = 0.004
STOPPED_SECONDS = 0.5
"""After so long a stopped helper is ended that owes an answer."""
NUM_HELPERS = 2
_KILLED = -9


class Helper(RenderProcess):
    """One process. Its conversations are the ids of their tokens."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self._ended = asyncio.Event()
        self.is_stopped = False

    async def talk(self, request: bytes, seconds: float, files: Sequence[int] = ()) -> bytes:
        try:
            async with asyncio.timeout(STOPPED_SECONDS if self.is_stopped else RENDER_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            if not self.is_stopped:
                job: RenderJob = msgspec.msgpack.decode(request)
                (message,) = json.loads(job["messages_json"])
                reply = RenderReply(text=message["content"], masks={}, reasoning_start="UNSPECIFIED")
                return msgspec.msgpack.encode(reply)
            self.was_stopped = True
        raise ConnectionResetError

    async def kill(self) -> int:
        self.end()
        return _KILLED

    def end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.reader.feed_eof()


class Helpers:
    """Starts the processes, and holds those that live.

    Attributes:
        may_start: Whether a process starts now.
    """

    def __init__(self) -> None:
        self.may_start = True
        self._living: list[Helper] = []

    async def start(self, setup: RenderSetup) -> Helper:
        await asyncio.sleep(START_SECONDS)
        if not self.may_start:
            raise errors.Unavailable("The process that renders chat templates does not start.")
        helper = Helper()
        self._living.append(helper)
        return helper

    def crash(self) -> None:
        """Kill all of them."""
        living, self._living = self._living, []
        for helper in living:
            helper.end()

    def stop(self) -> None:
        """Stop all of them."""
        for helper in self._living:
            helper.is_stopped = True


class SimulatedTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """Renders with a real ``Renderer``, whose processes are simulated."""

    def __init__(self, settings: TokenizerSettings, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self.helpers = Helpers()
        self._renderer = Renderer(
            "", {}, num_workers=NUM_HELPERS, seconds=settings.render_timeout, start_worker=self.helpers.start
        )

    async def GetTokenizerInfo(self, request: object, context: object) -> tokenizer_pb2.GetTokenizerInfoResponse:
        kinds = [MEDIA_KIND_IMAGE]
        return tokenizer_pb2.GetTokenizerInfoResponse(
            fingerprint=self._fingerprint, vocab_size=VOCAB_SIZE, max_token_bytes=16, media_kinds=kinds
        )

    async def EncodeChat(self, request: Any, context: object) -> tokenizer_pb2.EncodeChatResponse:
        job = RenderJob(
            messages_json=request.messages_json.decode(),
            tools_json="",
            template_kwargs_json="",
            add_generation_prompt=True,
            continue_final_message=False,
        )
        rendered = await self._renderer.render(job)
        token_ids, items = expand(json.loads(rendered.text), request.media)
        prompt = tokenizer_pb2.TokenizedPrompt(token_ids=token_ids, media=items)
        return tokenizer_pb2.EncodeChatResponse(prompt=prompt)

    async def start(self, host: Host) -> None:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, host._edge)  # type: ignore[arg-type]

    async def drain(self) -> None:
        """Do nothing: calls end at once."""

    async def stop(self) -> None:
        await self._renderer.close()
