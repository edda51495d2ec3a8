"""What clients ask, and what they got."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tokenloom.request.errors import Aborted, TokenloomError
from tokenloom.services.gateway.generation.delivered import Delivered
from tokenloom.services.gateway.generation.generator import Generator
from tokenloom.services.gateway.mesh.collector import Delta
from tokenloom.services.gateway.records.generate_request import Chat, GenerateRequest
from tokenloom.services.gateway.records.media import ClientFile, MediaPart
from tokenloom.services.gateway.records.request_ids import NEW, ClientPosition, ResumeToken, token_of_key
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import output_processor_pb2, types_pb2

from .mesh import Mesh
from .parts import Part
from .plan import Ask

E = TypeVar("E", bound=BaseException)

_LOOK_SECONDS = 0.05
"""How often a client looks whether its gateway lives."""
_LONG_AWAY_SECONDS, _LONG_PATIENCE_SECONDS = 10.0, 5.0
"""The request of a client that was away for so long may begin anew: the client must stay for as long as an answer
takes."""
_FINGERPRINT = b"simulation"
"""Stands for the digest of the request's body."""


@dataclass
class Answer:
    """Records what one client got.

    Attributes:
        tokens: By sample.
        texts: By sample.
        num_ends: By sample: how many ends were reported.
        gateways: Those that the client asked.
        error: What ended the request instead.
        bug: What was raised that is no answer to a client.
        began_at: Virtual seconds.
        ended_at: Virtual seconds; None while it runs.
        was_cancelled: The client went away.
        lost_gateway: Its gateway died, or none was there.
        was_cut: Its connection to a gateway that lives has ended.
        num_moves: How often it has left a gateway that had not ended it.
        num_taken: How often an earlier call, which its gateway served late, took it from a later one.
    """

    ask: Ask
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_ends: list[int] = field(default_factory=list)
    gateways: list[str] = field(default_factory=list)
    error: TokenloomError | None = None
    bug: BaseException | None = None
    began_at: float = 0.0
    ended_at: float | None = None
    was_cancelled: bool = False
    lost_gateway: bool = False
    was_cut: bool = False
    num_moves: int = 0
    num_taken: int = 0

    @property
    def seconds(self) -> float:
        """How long the client waited."""
        return (self.ended_at or float("inf")) - self.began_at

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.bug is None and not self.was_cancelled and not self.lost_gateway


class Client:
    """Sends one request and records its answer. It runs in the gateway's process, like the connection of a client."""

    def __init__(self, mesh: Mesh, ask: Ask) -> None:
        num = ask.num_samples
        self.answer = Answer(ask, [[] for _ in range(num)], [""] * num, [0] * num)
        self._mesh = mesh
        self._request_id = ""
        self._loop = mesh.network.loop
        self._num_fruitless = 0  # calls in a row that have brought nothing
        self._num_tokens = 0  # when the last call began
        self._asking: asyncio.Task[None] | None = None
        self._left: list[asyncio.Task[None]] = []  # calls that the client has left

    async def run(self) -> None:
        """Ask, and return when the request has ended."""
        answer, loop = self.answer, self._loop
        answer.began_at = loop.time()
        while True:
            if (gateway := self._choose()) is not None:
                answer.lost_gateway = not await self._ask(gateway)
            else:
                answer.lost_gateway = True
            if not answer.lost_gateway or not answer.ask.resumes or self._seconds_left() <= 0.0:
                break
            await asyncio.sleep(min(answer.ask.away, max(self._seconds_left(), 0.1)))
        answer.ended_at = answer.ended_at or loop.time()
        self._asking = None  # what the calls before still get is no part of the answer

    def _seconds_left(self) -> float:
        return self.answer.began_at + self.answer.ask.timeout - self._loop.time()

    def _choose(self) -> Part | None:
        """Return a gateway that serves, like a load balancer in front of them; the client's own one if it does."""
        gateways = self._mesh.of_kind("gateway")
        first = (self.answer.ask.gateway + self.answer.num_moves) % len(gateways)
        in_turn = [*gateways[first:], *gateways[:first]]
        return next((part for part in in_turn if part.is_serving), None)

    async def _ask(self, gateway: Part) -> bool:
        """Ask a gateway, or let it continue the answer. Return False if the gateway, or the connection, was lost."""
        process = gateway.process
        assert process is not None
        self.answer.gateways.append(gateway.name)
        asking = self._loop.create_task(self._record(gateway.service.generator), context=process.context)
        self._asking, leaves_at = asking, self._loop.time() + self._patience()
        self._num_tokens = sum(map(len, self.answer.tokens))
        while not asking.done():  # a process that dies ends nothing
            await asyncio.sleep(_LOOK_SECONDS)
            if process.is_dead and not asking.done():
                return False
            if self._loop.time() >= leaves_at and not asking.done():
                self._leave(asking)
                return False
            if self._must_cut() and asking.cancel():
                self.answer.was_cut = True
                await asyncio.wait([asking])
                return False
        takes_back = self.answer.ask.patience is not None or self._mesh.plan.stutters
        is_taken = takes_back and isinstance(self.answer.error, Aborted)
        if is_taken:  # by an earlier call, which its gateway has served late: the client takes the answer back
            self.answer.error, self.answer.num_taken = None, self.answer.num_taken + 1
        return not is_taken

    def _patience(self) -> float:
        """Return for how many seconds the client waits now for the end of its answer: twice as long as before where
        that has brought nothing. One that always left sooner than its prompt was encoded would never be answered."""
        ask = self.answer.ask
        if ask.patience is None:
            return math.inf
        if ask.away > _LONG_AWAY_SECONDS and self.answer.num_moves:
            return _LONG_PATIENCE_SECONDS
        return min(ask.patience * 2.0**self._num_fruitless, _LONG_PATIENCE_SECONDS)

    def _leave(self, asking: "asyncio.Task[None]") -> None:
        """Leave a call, of which its gateway learns later."""
        self.answer.was_cut = True
        self.answer.num_moves += 1
        has_brought = sum(map(len, self.answer.tokens)) > self._num_tokens
        self._num_fruitless = 0 if has_brought else self._num_fruitless + 1
        self._left.append(asking)  # the event loop holds no task
        self._loop.call_later(self.answer.ask.unnoticed, asking.cancel)

    def _must_cut(self) -> bool:
        """Return whether the connection ends now: once, although the gateway lives."""
        answer, seconds = self.answer, self.answer.ask.cut_after
        return seconds is not None and not answer.was_cut and self._loop.time() >= answer.began_at + seconds

    async def _record(self, generator: Generator) -> None:
        answer, seconds = self.answer, self.answer.ask.cancel_after
        try:
            async with asyncio.timeout(seconds):
                await self._take(generator)
        except TimeoutError:
            answer.was_cancelled = True
        except TokenloomError as error:
            if self._is_current():
                answer.error = _bare(error)
        except Exception as error:
            answer.bug = _bare(error)
        if self._is_current():
            answer.ended_at = asyncio.get_running_loop().time()

    def _is_current(self) -> bool:
        """Return whether the call of this task is the client's last one."""
        return asyncio.current_task() is self._asking

    async def _take(self, generator: Generator) -> None:
        delivered = self._delivered()
        async with generator.open(
            make_generate_request(self.answer.ask, max(self._seconds_left(), 0.01)), token=self._token()
        ) as generation:
            if self._is_current():
                self._request_id = generation.request_id if self.answer.ask.resumes else ""
            while not generation.done:
                for delta in await generation.take():
                    for part, is_new in delivered.cut(delta):
                        if is_new and self._is_current():
                            self._add(part)

    def _token(self) -> ResumeToken:
        if not self.answer.ask.resumes:
            return NEW
        if self.answer.ask.patience is not None:
            return token_of_key("", f"key {self.answer.ask.seed} {self.answer.ask.at}", _FINGERPRINT, "key")
        delivered = tuple(map(len, self.answer.tokens)) if self._request_id else ()
        return ResumeToken(self._request_id, _FINGERPRINT, resumes=bool(self._request_id), num_delivered=delivered)

    def _delivered(self) -> Delivered:
        """Return what the client has of the answer."""
        answer = self.answer
        return Delivered(
            {
                sample: ClientPosition(len(tokens), len(text), bool(ended))
                for sample, (tokens, text, ended) in enumerate(
                    zip(answer.tokens, answer.texts, answer.num_ends, strict=True)
                )
                if tokens or text or ended
            }
        )

    def _add(self, delta: Delta) -> None:
        answer = self.answer
        answer.tokens[delta.index] += delta.token_ids
        answer.texts[delta.index] += delta.text
        answer.num_ends[delta.index] += delta.finished is not None


NUM_SESSIONS = 7
"""Half of the requests are turns of so many sessions; their prompts begin alike or not."""


def _bare(error: E) -> E:
    """Return the error without its traceback, which would keep the whole run in memory."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def make_generate_request(ask: Ask, timeout: float) -> GenerateRequest:
    """Return the gateway's form of a request. ``timeout``: the seconds that it has left."""
    sampling = types_pb2.SamplingParams(max_tokens=ask.max_tokens, seed=ask.seed)
    if ask.has_grammar:
        sampling.structured_outputs.regex = f"grammar {ask.seed}"
    return GenerateRequest(
        prompts=_chat(ask.prompt, ask.files) if ask.is_chat else [ask.prompt],
        prompt_field="prompt",
        sampling=sampling,
        text=output_processor_pb2.TextOptions(stop=ask.stop),
        tenant=NO_TENANT,
        ignore_eos=True,
        num_samples=ask.num_samples,
        timeout=timeout,
        session=f"session {ask.seed % NUM_SESSIONS}" if ask.seed % 2 else "",
    )


def _chat(token_ids: Sequence[int], files: Sequence[bytes]) -> Chat:
    """Return a conversation whose text is the ids of its tokens, with marks for images."""
    media = [MediaPart(f"messages[0].content[{index}]", ClientFile.of(file)) for index, file in enumerate(files)]
    return Chat(json.dumps([{"role": "user", "content": json.dumps(token_ids)}]).encode(), media=media)
