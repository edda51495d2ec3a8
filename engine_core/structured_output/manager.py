"""Tracks the constraints of outputs: which grammars are being compiled, and how far each output was followed."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tokenloom.process.plugins import load
from tokenloom.request.reasoning import Reasoning

from ..data.config import ReasoningConfig, StructuredOutputConfig
from ..data.core_params import CoreSamplingParams, StructuredOutput
from ..data.messages import ErrorKind
from ..data.request import Request, RequestStatus
from ..data.scheduler_output import GrammarOutput, SchedulerOutput
from .compiler import CompileQueueFull, CompilerKiller, GrammarCompiler
from .compiler_process import CompilerUnavailable
from .grammar_backend import Bitmask, CompiledGrammar, GrammarError, bitmask_of
from .request_constraint import GrammarEnd, RequestConstraint, RequestGrammar

log = logging.getLogger(__name__)

FIELD = "structured_outputs"
"""The field of the request that errors name."""
FAILED = "the engine could not follow the request's grammar"
"""The error of a request whose grammar failed by a fault that is not its own."""
_BUDGET_FIELD = "thinking_token_budget"


_NO_REASONING = ReasoningConfig()
_NO_DRAFTS: Sequence[int] = ()


class Compiled(NamedTuple):
    """Says that a request no longer waits for its grammar."""

    request_id: str
    error: str
    """Why the request cannot run; empty if it can."""
    field: str = ""
    """The field of the request at fault, if any."""
    kind: ErrorKind = ErrorKind.UNAVAILABLE
    """With ``error``, unless there is a field."""


class _Row(NamedTuple):
    """Names a request whose next tokens may be bound."""

    request_id: str
    constraint: RequestConstraint
    new_token_ids: list[int]
    """Output tokens that the constraint has not followed."""
    drafts: Sequence[int]
    """Tokens that may come next; each one that does is followed by another token in the same step."""


class GrammarStep:
    """Holds the bitmasks of one step, which a thread computes while the model runs."""

    def __init__(self, future: "Future[tuple[GrammarOutput | None, dict[str, str]]]") -> None:
        self._future = future

    def output(self) -> GrammarOutput | None:
        """Wait for the bitmasks and return them; None if every request of the step may sample any token."""
        return self._future.result()[0]

    @property
    def ended(self) -> dict[str, str]:
        """Requests that get no token: their text is complete (""), or the error why they failed."""
        return self._future.result()[1]


class StructuredOutputManager:
    """Belongs to the thread that steps the core. It starts threads and processes only when a request needs them."""

    def __init__(
        self, config: StructuredOutputConfig, vocab_size: int, reasoning: ReasoningConfig = _NO_REASONING
    ) -> None:
        """Raises ``ValueError`` if the model cannot sample the tokens that end its reasoning, and for a backend of a
        plugin that cannot be loaded."""
        if ":" in config.backend:
            load("grammar_backends", config.backend, config.plugins)
        if reasoning.marks is not None and max(reasoning.marks.end) >= vocab_size:
            raise ValueError(
                f"reasoning_parser: the end mark has the tokens {list(reasoning.marks.end)}, but the model has "
                f"only tokens below {vocab_size}; set reasoning_parser to none"
            )
        self._reasoning = reasoning
        self.compiling: dict[str, Request] = {}
        """The requests that wait for their grammar."""
        self.live: dict[str, RequestConstraint] = {}
        """Constraints of the requests that have one and may run."""
        self.done: deque[tuple[str, Future[CompiledGrammar]]] = deque()
        """Results for :meth:`take_compiled`: at most one for each request."""
        self._compiler = GrammarCompiler(config, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._eos: Bitmask | None = None
        self._on_update: Callable[[], None] = lambda: None
        # One thread: the masks of a step are little work, done while the model runs.
        self._masks = ThreadPoolExecutor(1, "grammar-masks")

    def on_update(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when :attr:`done` may have something new."""
        self._on_update = callback

    def constrain(self, request: Request) -> str:
        """Follow a request from now on. If it has a grammar, it waits for that, in no queue.

        Returns an error if the request is refused at once. Raises ``CompileQueueFull``.
        """
        params = request.sampling_params
        if params.thinking_token_budget is not None and self._reasoning.marks is None:
            return f"{_BUDGET_FIELD}: this engine does not know the tokens that end the model's reasoning"
        if params.structured_output is not None:
            return self._compile(request, params.structured_output)
        self.live[request.request_id] = self._constraint(request, None)
        return ""

    def _compile(self, request: Request, constraint: StructuredOutput) -> str:
        request_id = request.request_id

        def done(future: Future[CompiledGrammar]) -> None:
            self.done.append((request_id, future))
            self._on_update()

        request.set_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        try:
            self._compiler.compile(constraint, request_id, request.tenant, done)
        except CompileQueueFull as full:
            raise CompileQueueFull(f"{FIELD}: {full}", is_tenants=full.is_tenants) from None
        self.compiling[request_id] = request
        return ""

    def take_compiled(self) -> list[Compiled]:
        """Return the requests whose grammar has compiled, or cannot be, since the last call."""
        ended = []
        while self.done:
            request_id, future = self.done.popleft()
            if (request := self.compiling.pop(request_id, None)) is None:
                continue  # ended meanwhile
            try:
                self.live[request_id] = self._constraint(request, future.result())
                ended.append(Compiled(request_id, ""))
            except CompilerUnavailable as error:
                # Another engine's compilers may live; without one, the request waits for these until its deadline.
                kind = ErrorKind.INTERNAL if isinstance(error, CompilerKiller) else ErrorKind.LEAVING
                ended.append(Compiled(request_id, f"{FIELD}: {error}", kind=kind))
            except GrammarError as error:
                ended.append(Compiled(request_id, f"{FIELD}: {error}", FIELD))
            except Exception:  # of the backend's library
                log.exception("the grammar of request %s cannot be used", request_id)
                ended.append(Compiled(request_id, FAILED))
        return ended

    def forget(self, request_id: str) -> None:
        """Drop the constraint of a request that has ended, and its compile if no other request wants that."""
        self.live.pop(request_id, None)
        if (request := self.compiling.pop(request_id, None)) is not None:
            assert request.sampling_params.structured_output is not None
            self._compiler.forget(request.sampling_params.structured_output, request_id)

    def start_step(
        self,
        scheduled: SchedulerOutput,
        requests: Mapping[str, Request],
        known_drafts: Mapping[str, list[int]] | None = None,
    ) -> GrammarStep | None:
        """Start computing the bitmasks of the requests in the step that sample a token and may be bound.

        ``known_drafts``: what the step verifies, if its plan names no drafts; see ``SchedulerOutput.defers_drafts``.
        Returns None if no request does.
        """
        rows = []
        for request_id, constraint in self.live.items():
            request = requests[request_id]
            drafts: Sequence[int] = scheduled.draft_token_ids.get(request_id, _NO_DRAFTS)
            num_computed = request.kv.num_computed_tokens - len(drafts)
            if known_drafts is not None:
                drafts = known_drafts.get(request_id, _NO_DRAFTS)
            if request_id in scheduled.num_scheduled_tokens and num_computed == request.num_tokens:
                num_seen = request.num_prompt_tokens + constraint.num_seen
                if constraint.may_bind(request.num_tokens - num_seen + len(drafts)):
                    rows.append(_Row(request_id, constraint, request.all_token_ids[num_seen:], drafts))
        # Masks are computed while the model runs: the step takes as long as the longer of both.
        return GrammarStep(self._masks.submit(_fill, rows, self._num_words)) if rows else None

    def awaits_tokens(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> bool:
        """Return whether a bitmask of the step depends on tokens in flight, so that it cannot be computed yet."""
        for request_id, constraint in self.live.items():
            request = requests[request_id]
            num_drafts = len(scheduled.draft_token_ids.get(request_id, _NO_DRAFTS))
            num_computed = request.kv.num_computed_tokens - num_drafts
            num_output = num_computed - request.num_prompt_tokens
            if (
                request_id in scheduled.num_scheduled_tokens
                and num_computed > request.num_tokens
                and constraint.may_bind(num_output + num_drafts - constraint.num_seen)
            ):
                return True
        return False

    def cut_drafts(
        self, draft_token_ids: Mapping[str, list[int]], requests: Mapping[str, Request]
    ) -> Mapping[str, list[int]]:
        """Return the drafts of live requests, each up to the first one that the request's constraint forbids.

        Called between steps, when no bitmask is being computed.
        """
        allowed = {}
        for request_id, drafts in draft_token_ids.items():
            if (constraint := self.live.get(request_id)) is None:
                allowed[request_id] = drafts
            else:
                request = requests[request_id]
                unseen = request.all_token_ids[request.num_prompt_tokens + constraint.num_seen :]
                try:
                    allowed[request_id] = drafts[: constraint.num_allowed(unseen, drafts)]
                except Exception:  # of the backend's library; the next bitmask fails the request
                    log.exception("the grammar of request %s failed", request_id)
                    allowed[request_id] = []
        return allowed

    def wait_for_masks(self) -> None:
        """Wait until no bitmask is being computed, after a step was given up."""
        self._masks.submit(lambda: None).result()

    def close(self) -> None:
        """End the compilers and threads. Idempotent."""
        self._compiler.close()
        self._masks.shutdown(wait=True)

    def _constraint(self, request: Request, compiled: CompiledGrammar | None) -> RequestConstraint:
        params, marks = request.sampling_params, self._reasoning.marks
        grammar = None if compiled is None else self._start(compiled, params)
        # By default a grammar begins after the end mark, as in vLLM: one that holds from the first token keeps a model
        # from reasoning.
        if marks is None or (self._reasoning.enable_in_reasoning and grammar is not None):
            return RequestConstraint(grammar)
        reasoning = Reasoning(marks, request.prompt_token_ids, request.reasoning_start)
        return RequestConstraint(grammar, reasoning, params.thinking_token_budget)

    def _start(self, compiled: CompiledGrammar, params: CoreSamplingParams) -> RequestGrammar:
        if self._eos is None:
            self._eos = bitmask_of(self._compiler.backend.eos_token_ids, self._num_words)
        return RequestGrammar(compiled.start(), self._eos, params.stop_token_ids or (), params.min_tokens)


def _fill(rows: list[_Row], num_words: int) -> tuple[GrammarOutput | None, dict[str, str]]:
    bitmask = np.empty((sum(1 + len(row.drafts) for row in rows), num_words), dtype=np.int32)
    bound: list[str] = []
    forced: dict[str, int] = {}
    ended: dict[str, str] = {}
    for row in rows:
        request_id, constraint = row.request_id, row.constraint
        try:
            constraint.accept(row.new_token_ids)
            num_rows = constraint.fill_rows(bitmask[len(bound) :], row.drafts)
            bound += [request_id] * num_rows
            if num_rows and constraint.forced is not None:
                forced[request_id] = constraint.forced
        except GrammarEnd:  # it may sample anything: its token is dropped
            ended[request_id] = ""
        except GrammarError as error:
            ended[request_id] = f"{FIELD}: {error}"
        except Exception:  # of the backend's library: it concerns this request only
            log.exception("the grammar of request %s failed", request_id)
            ended[request_id] = FAILED
    return GrammarOutput(bound, bitmask[: len(bound)], forced) if bound else None, ended
