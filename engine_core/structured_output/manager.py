"""Tracks the grammars of structured outputs: which are being compiled, and how far each output has followed its own."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ..config import StructuredOutputConfig
from ..scheduling.request import Request, RequestStatus
from ..wire.core_sampling_params import SamplingParams
from ..wire.scheduler_output import GrammarOutput, SchedulerOutput
from .compiler import GrammarCompiler
from .compiler_process import CompilerUnavailable
from .grammar_backend import Bitmask, CompiledGrammar, GrammarError, bitmask_of
from .request_grammar import GrammarEnd, RequestGrammar

FIELD = "structured_outputs"
"""The field of the request that errors name."""


class Compiled(NamedTuple):
    """Says that a request no longer waits for its grammar."""

    request_id: str
    error: str
    """Why the request cannot run; empty if it can."""
    field: str = ""
    """The field of the request at fault, if any."""


class _Row(NamedTuple):
    """Names a request whose next token must follow its grammar."""

    request_id: str
    grammar: RequestGrammar
    new_token_ids: list[int]
    """Output tokens that the grammar has not seen."""


class GrammarStep:
    """Holds the bitmasks of one step, which a thread computes while the model runs."""

    def __init__(self, future: "Future[tuple[GrammarOutput, dict[str, str]]]") -> None:
        self._future = future

    def output(self) -> GrammarOutput:
        """Wait for the bitmasks and return them."""
        return self._future.result()[0]

    @property
    def ended(self) -> dict[str, str]:
        """Requests that get no token: their text is complete (""), or the error why they failed."""
        return self._future.result()[1]


class StructuredOutputManager:
    """Belongs to the thread that steps the core. It starts threads and processes only when a request needs them."""

    def __init__(self, config: StructuredOutputConfig, vocab_size: int) -> None:
        self.compiling: dict[str, SamplingParams] = {}
        """Parameters of the requests that wait for their grammar."""
        self.live: dict[str, RequestGrammar] = {}
        """Grammars of the requests that have one."""
        self.done: deque[tuple[str, Future[CompiledGrammar]]] = deque()
        """Results for :meth:`take_compiled`: at most one for each request."""
        self._compiler = GrammarCompiler(config, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._eos: Bitmask | None = None
        self._on_news: Callable[[], None] = lambda: None
        # One thread: the masks of a step are little work, done while the model runs.
        self._masks = ThreadPoolExecutor(1, "grammar-masks")

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when :attr:`done` may have something new."""
        self._on_news = callback

    def compile(self, request: Request) -> str:
        """Let a request wait, in no queue, for its grammar. Returns an error if that is refused at once."""
        params, request_id = request.sampling_params, request.request_id
        assert params.structured_output is not None

        def done(future: Future[CompiledGrammar]) -> None:
            self.done.append((request_id, future))
            self._on_news()

        request.set_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        try:
            self._compiler.compile(params.structured_output, done)
        except GrammarError as error:
            return f"{FIELD}: {error}"
        self.compiling[request_id] = params
        return ""

    def take_compiled(self) -> list[Compiled]:
        """Return the requests whose grammar has compiled, or cannot be, since the last call."""
        news = []
        while self.done:
            request_id, future = self.done.popleft()
            if (params := self.compiling.pop(request_id, None)) is None:
                continue  # ended meanwhile
            try:
                self.live[request_id] = self._start(future.result(), params)
                news.append(Compiled(request_id, ""))
            except CompilerUnavailable as error:
                news.append(Compiled(request_id, f"{FIELD}: {error}"))
            except GrammarError as error:
                news.append(Compiled(request_id, f"{FIELD}: {error}", FIELD))
        return news

    def forget(self, request_id: str) -> None:
        """Drop the grammar of a request that has ended, if it has one."""
        self.compiling.pop(request_id, None)
        self.live.pop(request_id, None)

    def start_step(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> GrammarStep | None:
        """Start computing the bitmasks of the requests in the step that draw a token under a grammar.

        Returns None if no request does.
        """
        rows = []
        for request_id, grammar in self.live.items():
            request = requests[request_id]
            if request_id in scheduled.num_scheduled_tokens and request.num_computed_tokens == request.num_tokens:
                num_seen = request.num_prompt_tokens + grammar.num_accepted
                rows.append(_Row(request_id, grammar, request.all_token_ids[num_seen:]))
        return GrammarStep(self._masks.submit(_fill, rows, self._num_words)) if rows else None

    def awaits_tokens(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> bool:
        """Return whether a bitmask of the step depends on tokens in flight, so that it cannot be computed yet."""
        return any(
            request_id in scheduled.num_scheduled_tokens
            and requests[request_id].num_computed_tokens > requests[request_id].num_tokens
            for request_id in self.live
        )

    def wait_for_masks(self) -> None:
        """Wait until no bitmask is being computed, after a step was given up."""
        self._masks.submit(lambda: None).result()

    def close(self) -> None:
        """End the compilers and threads. Idempotent."""
        self._compiler.close()
        self._masks.shutdown(wait=True)

    def _start(self, compiled: CompiledGrammar, params: SamplingParams) -> RequestGrammar:
        if self._eos is None:
            self._eos = bitmask_of(self._compiler.backend.eos_token_ids, self._num_words)
        return RequestGrammar(compiled.start(), self._eos, params.stop_token_ids or (), params.min_tokens)


def _fill(rows: list[_Row], num_words: int) -> tuple[GrammarOutput, dict[str, str]]:
    # The row of a request that has ended allows everything: its token is dropped.
    bitmask = np.full((len(rows), num_words), -1, dtype=np.int32)
    ended: dict[str, str] = {}
    for row, bits in zip(rows, bitmask, strict=True):
        try:
            row.grammar.accept(row.new_token_ids)
            row.grammar.fill(bits)
        except GrammarEnd:
            ended[row.request_id] = ""
        except GrammarError as error:
            ended[row.request_id] = f"{FIELD}: {error}"
        if row.request_id in ended:
            bits[:] = -1
    return GrammarOutput([row.request_id for row in rows], bitmask), ended
