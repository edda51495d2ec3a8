"""Messages between the scheduler and the worker for each step. They carry only changes; the worker keeps the rest.

Workers return a promise of a step's output while the device still computes, and executors pass it on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .core_params import CorePoolingParams, CoreSamplingParams
from .embedding_rows import EmbedsSpan, MediaSpan
from .messages import ExpertLoads, LogitsStats, Logprobs, RoutedExperts


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """Describes a request that the worker does not know yet."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Accepted tokens of earlier attempts."""
    sampling_params: CoreSamplingParams
    block_ids: list[int]
    """The request's whole block table so far."""
    num_computed_tokens: int
    prompt_embeds: list[EmbedsSpan] = []
    """Embeddings that the worker keeps for the life of the request."""
    adapter: bytes = b""
    """The digest of its LoRA adapter; empty: the base model."""
    pooling_params: CorePoolingParams | None = None
    """The request is pooled when its prompt is computed, and samples nothing."""
    media: list[MediaSpan] = []
    """Its images, in order of position; their rows come with the steps that compute them."""
    tenant: str = ""
    """Whose it is. Only answers of the same tenant with the same ``cache_salt`` may be looked at for its drafts."""
    cache_salt: bytes = b""
    """What sets its prefixes apart from those of others, as in ``EngineCoreRequest``."""


class CachedRequestData(msgspec.Struct, array_like=True, gc=False):
    """Describes requests that the worker knows, in parallel columns."""

    req_ids: list[str]
    new_block_ids: list[list[int]]
    """[n] blocks to append to the block table; for a resumed request, its whole new block table."""
    num_computed_tokens: list[int]
    resumed_token_ids: dict[str, list[int]]
    """Prompt and output token ids of requests that resume after a preemption: their rows are built again."""


class StateRun(msgspec.Struct, array_like=True, gc=False):
    """Names the slots of a run of tokens, which the layers that keep a state compute one after the other."""

    req_id: str
    num_tokens: int
    read: int
    """The slot with the state before the first token; -1: there is none, the run begins from zero."""
    written: int
    """The slot that takes the state after the last token. If it is ``read``, the state changes in place; otherwise the
    slot that is read keeps what it has."""


class _Base(NamedTuple):
    slot: int
    """Where the state before the drafts of a request's latest step lies."""
    num_tokens: int
    """After how many tokens."""
    draft_slot: int
    """Where the state after them lies; -1: the step had no place for drafts."""
    num_drafts: int


class StateBases:
    """Knows in which slots the states of requests lie whose steps are planned before the drafts are known that are
    right: the worker's part of such a plan.

    A request has two slots. If all drafts of a step are right, its state is the one after them, and the other slot is
    free for the next drafts. If one is wrong, its state is the one before them, and the next step computes those that
    were right again, in the place of drafts.
    """

    def __init__(self, *, is_strict: bool) -> None:
        """``is_strict``: whether each decoded token is a run of its own (a ``ModelInfo.state_chunk`` above 1)."""
        self._is_strict = is_strict
        self._bases: dict[str, _Base] = {}

    def has(self, req_id: str) -> bool:
        """Return whether the slot of a request is known here only."""
        return req_id in self._bases

    def forget(self, req_ids: Iterable[str]) -> None:
        """Forget requests that ended or lost their slots."""
        for req_id in req_ids:
            self._bases.pop(req_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._bases.clear()

    def missing(self, req_id: str, num_known: int) -> int:
        """Return how many of the known tokens of a request its state lacks."""
        return num_known - self._before(req_id, num_known).num_tokens

    def take(self, runs: Sequence[StateRun], num_known: int, num_places: int, num_drafts: int) -> list[StateRun]:
        """Return the runs of a request in a step that begins now, and note where its state is behind it.

        Args:
            runs: Those of the plan: a token, and the places for drafts.
            num_known: Its tokens of prompt and output.
            num_places: Drafts that the plan has room for.
            num_drafts: Those that the step verifies; none if the state lacks more than the last token.
        """
        req_id = runs[0].req_id
        before = self._before(req_id, num_known)
        read, written = runs[0].read, runs[0].written
        if self.has(req_id):
            read = written = before.slot
        # The plan names both slots, in either order, or its own and another one where no drafts were in flight.
        other = runs[-1].written if written == runs[0].written else runs[0].written
        missing = num_known - before.num_tokens
        if num_places:
            self._bases[req_id] = _Base(written, num_known, other, num_drafts)
        else:
            self._bases.pop(req_id, None)  # the next plan knows its slot
        found = self._runs(req_id, missing, read, written)
        return found + self._runs(req_id, num_drafts, written, other)

    def _before(self, req_id: str, num_known: int) -> _Base:
        """Return where the state of a request is now, and which other slot it has."""
        base = self._bases.get(req_id)
        if base is None:
            return _Base(-1, num_known - 1, -1, 0)
        if base.num_drafts and num_known - 1 == base.num_tokens + base.num_drafts:
            return _Base(base.draft_slot, num_known - 1, base.slot, 0)
        return base._replace(num_drafts=0)

    def _runs(self, req_id: str, count: int, read: int, written: int) -> list[StateRun]:
        if not self._is_strict:
            return [StateRun(req_id, count, read, written)] if count else []
        return [StateRun(req_id, 1, written if index else read, written) for index in range(count)]


UNKNOWN_DRAFT = -1
"""Stands for a draft that only the worker knows."""


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """Describes the work of one step."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Number of tokens to compute for each request of the step."""
    total_num_scheduled_tokens: int
    finished_req_ids: list[str]
    """Requests that ended since the last step; the worker forgets them."""
    preempted_req_ids: list[str]
    """Requests that lost their blocks in this step; the worker forgets their rows."""
    draft_token_ids: dict[str, list[int]] = {}
    """Drafts that this step verifies, by request. Such a request has sampled all tokens but the drafts, and computes
    its last token and the drafts: its number of scheduled tokens is one more than its drafts. With ``defers_drafts``
    the lists hold :data:`UNKNOWN_DRAFT` only."""
    num_drafts_wanted: dict[str, int] = {}
    """How many drafts the worker may propose after this step, by request; none for a request that is not named."""
    lora_slots: list[bytes] | None = None
    """The digests of the LoRA adapters in slots from this step on; None: those of the step before."""
    drafts_paused: bool = False
    """Whether drafts cost more time than they save, so that what drafts need not follow the requests until some are
    wanted again."""
    media_rows: dict[str, list[EmbedsSpan]] = {}
    """Rows of images for the tokens that this step computes, by request, in order of position: all that it needs, cut
    to its chunk, [n, levels * hidden_size]. The worker needs them for this step only."""
    state_runs: list[StateRun] = []
    """The runs of all requests of the step, in the order of ``num_scheduled_tokens``, those of a request by position;
    empty for a model that keeps no state. No slot that one request writes is read or written by another one."""
    cross_block_ids: dict[str, list[int]] = {}
    """The blocks with the keys and values of the rows beside a prompt, by request that begins or resumes in this step:
    the worker keeps them with its row. If ``media_rows`` has the rows, the step writes these blocks from them."""
    defers_drafts: bool = False
    """Whether steps are planned before the drafts are known that they verify, and how many of those before them are
    right: then ``draft_token_ids`` says how many each request has at most, and the worker calls :meth:`with_drafts`."""

    def with_drafts(
        self,
        num_known: Callable[[str], int],
        proposed: Mapping[str, Sequence[int]],
        bases: StateBases | None = None,
    ) -> "SchedulerOutput":
        """Return the step with what the worker knows when it begins.

        Every request in ``draft_token_ids`` computes its last known token and the drafts that were ``proposed`` after
        it, as far as the plan has room. The plan counted each earlier draft as right, so those tokens lie at the
        planned positions or before them, for which the request has blocks.

        Args:
            num_known: Returns how many tokens of prompt and output a request has.
            proposed: What the worker proposed after the step before this one.
            bases: Where the states of requests are; None: the model keeps none.
        """
        if bases is not None:
            return self._with_states(num_known, proposed, bases)
        if not self.draft_token_ids:
            return self
        scheduled, drafts = dict(self.num_scheduled_tokens), dict[str, list[int]]()
        for req_id, places in self.draft_token_ids.items():
            found = [*proposed.get(req_id, ())[: len(places)]]
            scheduled[req_id] = 1 + len(found)
            if found:
                drafts[req_id] = found
        cached = self.scheduled_cached_reqs
        computed = [
            num_known(req_id) - 1 if req_id in self.draft_token_ids else count
            for req_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        return msgspec.structs.replace(
            self,
            scheduled_cached_reqs=msgspec.structs.replace(cached, num_computed_tokens=computed),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            draft_token_ids=drafts,
        )

    def _with_states(
        self, num_known: Callable[[str], int], proposed: Mapping[str, Sequence[int]], bases: StateBases
    ) -> "SchedulerOutput":
        """Do the same where layers keep a state: what it lacks is computed first, and drafts follow one token only."""
        bases.forget([*self.finished_req_ids, *self.preempted_req_ids, *self.scheduled_cached_reqs.resumed_token_ids])
        cached, scheduled = self.scheduled_cached_reqs, dict(self.num_scheduled_tokens)
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts, runs = dict[str, list[int]](), list[StateRun]()
        for req_id, of_request in groupby(self.state_runs, lambda run: run.req_id):
            planned, places = list(of_request), self.draft_token_ids.get(req_id)
            if places is None and not bases.has(req_id):
                runs += planned
                continue
            known, num_places = num_known(req_id), len(places or ())
            missing = bases.missing(req_id, known)
            found = [*proposed.get(req_id, ())[:num_places]] if missing == 1 else []
            scheduled[req_id], computed[req_id] = missing + len(found), known - missing
            if found:
                drafts[req_id] = found
            runs += bases.take(planned, known, num_places, len(found))
        return msgspec.structs.replace(
            self,
            scheduled_cached_reqs=msgspec.structs.replace(
                cached, num_computed_tokens=[computed[req_id] for req_id in cached.req_ids]
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            draft_token_ids=drafts,
            state_runs=runs,
        )

    def num_computed_tokens(self) -> dict[str, int]:
        """Return, for every request of the step, how many of its tokens were computed before it."""
        cached = self.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in self.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed


class GrammarOutput(msgspec.Struct, array_like=True, gc=False):
    """Holds the tokens that may be sampled in a step, for the requests that sample one and may not sample every one."""

    req_ids: list[str]
    """[n] a request stands here once for each of its rows: the first is for the token after its last one, the next for
    the token after its first draft, and so on. A request with fewer rows than tokens to sample samples only so many."""
    bitmask: npt.NDArray[np.int32]
    """[n, ceil(vocab_size / 32)]: bit i of word w is set if token 32 * w + i is allowed. Do not change it."""
    forced: dict[str, int] = {}
    """The only token that a request samples in its first row, even if a sampling parameter forbids it."""

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return [n, vocab_size]: whether each token may be sampled."""
        bits = np.unpackbits(self.bitmask.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return bits.astype(np.bool_)


class WorkerTimes(msgspec.Struct, array_like=True, gc=False):
    """Says how long the parts of a step took in the worker."""

    forward_ns: int
    """The forward pass, as far as the host waits for it: on a device that computes beside the host, its start."""
    sample_ns: int
    """From the begin of sampling until the tokens were on the host."""


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Holds what the worker computed in a step."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """[n] parallel to ``req_ids``; an empty list for a request whose prompt is not complete yet. Of a request with
    drafts: those drafts that are right, from the first on, and the token after them."""
    logprobs: dict[str, Logprobs] = {}
    """Log probabilities of the sampled tokens, a row for each, by request that asks for them."""
    prompt_logprobs: dict[str, Logprobs] = {}
    """Log probabilities of the prompt tokens whose logits this step computed, by request that asks for them."""
    num_nans_in_logits: dict[str, int] = {}
    """Number of NaN logits by request, for rows that contain any, if they are counted."""
    without_choice: list[str] = []
    """Requests whose masks allow no token; their entry in ``sampled_token_ids`` is empty."""
    logits_stats: dict[str, LogitsStats] = {}
    """Statistics of the logits by request that sampled a token, in steps that are measured."""
    without_finite_logit: list[str] = []
    """Requests whose logits are all NaN or infinite; their entry in ``sampled_token_ids`` is empty."""
    draft_token_ids: dict[str, list[int]] = {}
    """Drafts of the tokens after the last sampled one, by request: at most ``SchedulerOutput.num_drafts_wanted``."""
    routed_experts: dict[str, RoutedExperts] = {}
    """Those of the tokens that this step computed, by request that asks for them."""
    expert_loads: ExpertLoads | None = None
    """After this step, of a model with experts."""
    pooled: dict[str, npt.NDArray[np.float32]] = {}
    """Results of the pooling requests whose prompts are complete; they sample no token."""
    num_verified: dict[str, int] = {}
    """How many drafts of each request the step verified, of those that had any."""
    times: WorkerTimes | None = None
    """If steps are traced."""


class PendingOutput(Protocol):
    """Promises the output of a step (a ``concurrent.futures.Future`` is one)."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the output, and return the same one at every call. Raises the error of either half of the step."""


class FinishedOutput:
    """Holds the output of a step that has already ended."""

    __slots__ = ("_output",)

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


def as_pending(output: ModelRunnerOutput | PendingOutput) -> PendingOutput:
    """Return what a worker's ``sample_tokens`` returned as a promise."""
    return FinishedOutput(output) if isinstance(output, ModelRunnerOutput) else output


def await_output(output: ModelRunnerOutput | PendingOutput) -> ModelRunnerOutput:
    """Return the output of a step, once it is there."""
    return output if isinstance(output, ModelRunnerOutput) else output.result()
