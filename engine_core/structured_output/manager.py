"""What the core knows of its requests' grammars: which are being compiled, how far each output has followed its own."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from ..config import StructuredOutputConfig
from ..wire.core_sampling_params import SamplingParams, StructuredOutput
from ..wire.scheduler_output import GrammarOutput
from .compiler import GrammarCompiler
from .compiler_process import CompilerUnavailable
from .grammar_backend import Bitmask, CompiledGrammar, GrammarError, StructuredOutputBackend, bitmask_of
from .request_grammar import GrammarEnd, RequestGrammar

FIELD = "structured_outputs"
"""What errors name."""


class Compiler(Protocol):
    """What :class:`GrammarCompiler` offers."""

    @property
    def backend(self) -> StructuredOutputBackend: ...

    def compile(self, constraint: StructuredOutput, done: Callable[[Future[CompiledGrammar]], None]) -> None: ...

    def close(self) -> None: ...


class Compiled(NamedTuple):
    """A request that waits no more."""

    request_id: str
    error: str
    """Why it cannot run; empty: it can."""
    field: str = ""
    """Of the request, that is at fault."""


class ConstrainedRow(NamedTuple):
    """A request whose next token must follow its grammar."""

    request_id: str
    new_token_ids: list[int]
    """Output tokens that the grammar has not seen."""


class GrammarStep:
    """The bitmasks of one step, computed in a thread while the model runs."""

    def __init__(self, future: "Future[tuple[GrammarOutput, dict[str, str]]]") -> None:
        self._future = future

    def output(self) -> GrammarOutput:
        """Waits for them."""
        return self._future.result()[0]

    @property
    def ended(self) -> dict[str, str]:
        """Requests that no token is to be taken for: their text is complete (""), or why they failed."""
        return self._future.result()[1]


class StructuredOutputManager:
    """Belongs to the thread that steps the core. No request uses it, no thread or process of it is started."""

    def __init__(self, config: StructuredOutputConfig, vocab_size: int, compiler: Compiler | None = None) -> None:
        self._compiler = compiler or GrammarCompiler(config, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._eos: Bitmask | None = None
        self._compiling: dict[str, SamplingParams] = {}
        self._grammars: dict[str, RequestGrammar] = {}
        # What compilers have done and the core has not yet seen: at most one for each request.
        self._done: deque[tuple[str, Future[CompiledGrammar]]] = deque()
        self._on_news: Callable[[], None] = lambda: None
        # One thread: masks of a step are small work, and the model runs beside it.
        self._masks = ThreadPoolExecutor(1, "grammar-masks")

    def on_news(self, callback: Callable[[], None]) -> None:
        """``callback`` is called, from any thread, when :meth:`take_compiled` may have something."""
        self._on_news = callback

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def live(self) -> dict[str, RequestGrammar]:
        """Of the requests that have their grammar."""
        return self._grammars

    def compile(self, request_id: str, params: SamplingParams) -> None:
        """Has the request's grammar made. Raises ``GrammarError`` when it is refused at once."""
        assert params.structured_output is not None

        def done(future: Future[CompiledGrammar]) -> None:
            self._done.append((request_id, future))
            self._on_news()

        self._compiler.compile(params.structured_output, done)
        self._compiling[request_id] = params

    def has_news(self) -> bool:
        return bool(self._done)

    def take_compiled(self) -> list[Compiled]:
        """Requests whose grammar is there, or cannot be."""
        news = []
        while self._done:
            request_id, future = self._done.popleft()
            if (params := self._compiling.pop(request_id, None)) is None:
                continue  # ended meanwhile
            try:
                self._grammars[request_id] = self._start(future.result(), params)
                news.append(Compiled(request_id, ""))
            except CompilerUnavailable as error:
                news.append(Compiled(request_id, f"{FIELD}: {error}"))
            except GrammarError as error:
                news.append(Compiled(request_id, f"{FIELD}: {error}", FIELD))
        return news

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._compiling.pop(request_id, None)
        self._grammars.pop(request_id, None)

    def start_step(self, rows: Sequence[ConstrainedRow]) -> GrammarStep:
        """Begins to compute the bitmasks of these rows; at least one."""
        work = [(row, self._grammars[row.request_id]) for row in rows]
        return GrammarStep(self._masks.submit(_fill, work, self._num_words))

    def close(self) -> None:
        """Ends what works for it. Idempotent."""
        self._compiler.close()
        self._masks.shutdown(wait=True)

    def _start(self, compiled: CompiledGrammar, params: SamplingParams) -> RequestGrammar:
        if self._eos is None:
            self._eos = bitmask_of(self._compiler.backend.eos_token_ids, self._num_words)
        return RequestGrammar(compiled.start(), self._eos, params.stop_token_ids, params.min_tokens)


def _fill(work: list[tuple[ConstrainedRow, RequestGrammar]], num_words: int) -> tuple[GrammarOutput, dict[str, str]]:
    # Of a request that has ended nothing is wanted any more: its row allows everything.
    bitmask = np.full((len(work), num_words), -1, dtype=np.int32)
    ended: dict[str, str] = {}
    for (row, grammar), bits in zip(work, bitmask, strict=True):
        try:
            grammar.accept(row.new_token_ids)
            grammar.fill(bits)
        except GrammarEnd:
            ended[row.request_id] = ""
        except GrammarError as error:
            ended[row.request_id] = f"{FIELD}: {error}"
        if row.request_id in ended:
            bits[:] = -1
    return GrammarOutput([row.request_id for row, _ in work], bitmask), ended
