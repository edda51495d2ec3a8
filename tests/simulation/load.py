"""What clients ask, and what they got."""

import asyncio
import functools
from dataclasses import dataclass, field
from typing import TypeVar

from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request.errors import TokenloomError
from tokenloom.services.gateway.generation.job import Job
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import output_processor_pb2, types_pb2

from .mesh import VOCAB_SIZE, Mesh
from .plan import Ask

E = TypeVar("E", bound=BaseException)


@dataclass
class Answer:
    """Records what one client got.

    Attributes:
        tokens: By sample.
        texts: By sample.
        num_ends: By sample: how many ends were reported.
        error: What ended the request instead.
        began_at: Virtual seconds.
        ended_at: Virtual seconds; None while it runs.
        was_cancelled: The client went away.
        lost_gateway: Its gateway died, or was not there.
    """

    ask: Ask
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_ends: list[int] = field(default_factory=list)
    error: TokenloomError | None = None
    bug: BaseException | None = None
    began_at: float = 0.0
    ended_at: float | None = None
    was_cancelled: bool = False
    lost_gateway: bool = False

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.bug is None and not self.was_cancelled and not self.lost_gateway


class Client:
    """Sends one request and records its answer. It runs in the gateway's process, like the connection of a client."""

    def __init__(self, mesh: Mesh, ask: Ask) -> None:
        num = ask.num_samples
        self.answer = Answer(ask, [[] for _ in range(num)], [""] * num, [0] * num)
        self._mesh = mesh

    async def run(self) -> None:
        """Ask, and return when the request has ended."""
        answer, gateway, loop = self.answer, self._mesh.gateway, self._mesh.network.loop
        answer.began_at = loop.time()
        process = gateway.process
        if process is None or gateway.service is None:
            answer.lost_gateway, answer.ended_at = True, loop.time()
            return
        asking = loop.create_task(self._ask(gateway.service.generator), context=process.context)
        while not asking.done():  # a process that dies ends nothing
            await asyncio.sleep(0.05)
            if process.is_dead:
                answer.lost_gateway = True
                break
        answer.ended_at = answer.ended_at or loop.time()

    async def _ask(self, generator: object) -> None:
        answer, seconds = self.answer, self.answer.ask.cancel_after
        try:
            async with asyncio.timeout(seconds):
                await self._take(generator)
        except TimeoutError:
            answer.was_cancelled = True
        except TokenloomError as error:
            answer.error = _bare(error)
        except Exception as error:
            answer.bug = _bare(error)
        answer.ended_at = asyncio.get_running_loop().time()

    async def _take(self, generator: object) -> None:
        answer = self.answer
        async with generator.open(make_job(answer.ask)) as generation:  # type: ignore[attr-defined]
            while not generation.done:
                for delta in await generation.take():
                    answer.tokens[delta.index] += delta.token_ids
                    answer.texts[delta.index] += delta.text
                    answer.num_ends[delta.index] += delta.finished is not None


def _bare(error: E) -> E:
    """Return the error without its traceback, which would keep the whole run in memory."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def make_job(ask: Ask) -> Job:
    """Return the gateway's form of a request."""
    return Job(
        prompts=[ask.prompt],
        prompt_field="prompt",
        sampling=types_pb2.SamplingParams(max_tokens=ask.max_tokens, seed=ask.seed),
        text=output_processor_pb2.TextOptions(stop=ask.stop),
        tenant=NO_TENANT,
        ignore_eos=True,
        num_samples=ask.num_samples,
        timeout=ask.timeout,
    )


@functools.lru_cache(maxsize=1024)
def _expected(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE)


def expected(ask: Ask) -> list[int]:
    """Return the tokens of each sample of the answer, if nothing ends it early."""
    return _expected(tuple(ask.prompt), ask.max_tokens)
