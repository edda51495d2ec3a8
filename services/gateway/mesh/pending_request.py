"""Keeps what a request needs to continue on another output processor when its own is lost."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from google.protobuf.duration_pb2 import Duration

from tokenloom.request import errors, packed_ids
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget, RetryDebt
from tokenloom.v1 import output_processor_pb2, types_pb2
from tokenloom.v1 import output_processor_pb2 as pb

from ..records.generate_request import RestorableMedia


class Sink(Protocol):
    """Receives the output of one client request, by index. Its methods are called by streams and never wait."""

    @property
    def failed(self) -> bool:
        """Whether the request has ended with an error."""

    @property
    def is_superseded(self) -> bool:
        """Whether a later call runs the request, so that it is not sent again for this one."""

    @property
    def is_unattended(self) -> bool:
        """Whether the connection of the request's client has ended, and it may come back."""

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of an index arrived."""

    def journal(self, index: int, sample_index: int, start: int = 0) -> output_processor_pb2.SampleJournal:
        """Return what another output processor needs to continue an index; of its tokens those from ``start`` on."""

    def put(
        self,
        index: int,
        text: str,
        token_index: int,
        token_ids: list[int],
        *,
        logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = (),
        ends: bool = False,
    ) -> None:
        """Add text and tokens. ``ends``: :meth:`finish` follows at once."""

    def put_prompt(self, index: int, logprobs: output_processor_pb2.SlotTextLogprobs) -> None:
        """Add log probabilities of an index's prompt."""

    def put_pooled(self, index: int, part: types_pb2.Pooled) -> None:
        """Add the result of an index, or the next part of it."""

    def finish(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """End an index."""

    def fail(self, error: errors.TokenloomError) -> None:
        """End the request. Only the first error counts."""


MAX_LOSSES_ALONE = 3
"""Output processors that may end while they run a request alone, without any new output of it. Then the request ends,
because it may be what ends them."""
MAX_MEDIA_LOSSES = 5
"""How often a request's files may be lost, without any new output of it, until it ends: encoders may be too small."""
MAX_WRONG = 5
"""Streams that may end, because of a wrong frame, while they have a request and bring it no further."""
Incarnation: TypeAlias = tuple[str, int]
"""The address and the epoch of an output processor: one that was restarted has another epoch."""


class Origin(NamedTuple):
    """What has computed a sample's tokens, as ``SampleWeights`` says it."""

    weights: Sequence[bytes]
    numerics: str
    is_mixed: bool


class PendingRequest:
    """Holds one Submit from its beginning until its last sample has ended, whichever output processors run it.

    A prompt that does not fit into the budget of kept prompts is forgotten once it was sent. If the output processor of
    such a request is lost, the request ends with a retryable error.

    Attributes:
        collector: Receives the output: sample ``i`` at ``first_index + i``.
        left_at: The addresses of output processors that were lost with it, and may still run it.
        key: Its tenant and its id; a client may name an id that a request of another tenant has.
        num_live: Samples that have not ended.
        max_tokens: Of each sample.
        media: Its images; None: it has none.
        num_bytes: Size of the prompt in memory, and of the recipe.
        engine_deaths: Engines that died while they ran it.
        num_prompt_logprobs: Positions of the prompt whose log probabilities arrived.
        refused_by: The streams that refused it, or the rest of it, since its output processor was last lost.
        runner: The stream that it was sent to last, or sought on; None: none yet.
        may_begin: While it is sought: its client has nothing of it, so that it may begin anew if no part has it.
        seeks_copy: While it is sought: no output processor runs it, so that a copy may continue it.
        unknown_to: The streams whose output processors do not have it, while it is sought.
        debt: Says whether it may be sent again.
        is_accepted: An output processor has run it, so that it is not refused any more.
        origins: By sample, what computed its tokens.
        withdraw: Ends it at its output processor.
        sought_until: When the search ends for the output processor that has the request, which is to be resumed; 0: it
            is a new request, or its output processor was found.
    """

    __slots__ = (
        "_ended_alone",
        "_kept",
        "_num_media_losses",
        "_num_tokens_sent",
        "_num_wrong",
        "_refusal",
        "_resume",
        "_started",
        "_submit",
        "collector",
        "debt",
        "engine_deaths",
        "first_index",
        "is_accepted",
        "key",
        "left_at",
        "max_tokens",
        "may_begin",
        "media",
        "num_bytes",
        "num_live",
        "num_prompt_logprobs",
        "num_samples",
        "origins",
        "refused_by",
        "request_id",
        "runner",
        "seeks_copy",
        "sought_until",
        "takes_over",
        "unknown_to",
        "withdraw",
    )

    def __init__(
        self,
        submit: pb.Submit,
        collector: Sink,
        first_index: int,
        kept: AdmissionLimit,
        budget: RetryBudget,
        *,
        now: float,
        sought_until: float = 0.0,
        media: RestorableMedia | None = None,
    ) -> None:
        """``submit``: its slot is filled in here; it must not change any more. ``kept``: limits the bytes of the
        prompts that the gateway keeps for requests in work. ``budget``: of the gateway's retries. ``now``: when its
        timeout began. ``media``: its images; None: it has none."""
        self.request_id, self.takes_over = submit.request_id, submit.take_over
        self.key = submit.tenant, submit.request_id
        self.sought_until = sought_until
        self.collector = collector
        self.first_index = first_index
        self.num_live = self.num_samples = submit.num_samples or 1
        self.num_bytes = 4 * (len(submit.prompt.token_ids) or packed_ids.num_ids(submit.prompt)) + len(submit.recipe)
        for span in submit.prompt.embeds:
            self.num_bytes += len(span.rows)
        self.max_tokens = submit.sampling_params.max_tokens or sys.maxsize
        self.engine_deaths = submit.engine_deaths
        self.num_prompt_logprobs = submit.num_prompt_logprobs
        self.refused_by: list[object] = []
        self.unknown_to: list[object] = []
        self.runner: object | None = None
        self.left_at = set[str]()  # bounded by the output processors
        self.may_begin = self.seeks_copy = False
        self.debt = RetryDebt(budget)
        self.is_accepted = False
        self.media = media
        self._num_media_losses = 0
        self.origins: dict[int, Origin] = {}
        self.withdraw: Callable[[], None] | None = None
        self._submit: pb.Submit | None = submit
        self._resume = _resume(submit) if sought_until else None
        # A prompt of embeddings takes 16 KB a token at a hidden size of 4,096, so what is kept for a loss has a budget.
        # Without room the request runs, and ends with a retryable error if its output processor is lost.
        self._kept = kept.take(self.num_bytes)
        self._started = now
        self._ended_alone = set[Incarnation]()  # bounded by MAX_LOSSES_ALONE
        self._num_tokens_sent = self._num_wrong = 0
        self._refusal: errors.TokenloomError | None = None

    def first(self, slot: int) -> pb.Submit:
        """Return what to send at the very beginning."""
        assert self._submit is not None
        submit = self._submit
        submit.slot = slot
        if self._kept is None:
            self._submit = None
        return submit

    @property
    def is_sought(self) -> bool:
        """Whether the request is to be resumed, and the output processor that has it has sent nothing yet."""
        return bool(self.sought_until) and not self._num_tokens()

    def found(self) -> None:
        """Note that an output processor has it, although nothing of its output came yet. If that one is lost, it begins
        again with what is here, instead of being sought where it is no more."""
        if self._submit is not None:
            self.sought_until, self.seeks_copy = 0.0, False

    def resume(self, slot: int) -> pb.Resume:
        """Return what to send to an output processor that may have the request. All output is sent again: the parsers
        of an answer need its beginning."""
        assert self._resume is not None
        self._resume.slot, self._resume.from_copy = slot, self.seeks_copy
        if not self.takes_over:  # no other output processor begins it
            self._forget_unless_kept()
        return self._resume

    def again(self, slot: int, *, now: float) -> pb.Submit:
        """Return what to send to another output processor, or to the first one after a wait."""
        submit = self._continued(slot, now)
        if submit.journals:
            submit.take_over = False  # what the client has must not come again
        self._num_tokens_sent = self._num_tokens()
        self._forget_unless_kept()
        return submit

    @property
    def can_be_copied(self) -> bool:
        """Whether a call may resume it, so that a copy of it is of use."""
        submit = self._submit
        is_whole = submit is not None and submit.HasField("sampling_params") and not submit.HasField("kv_transfer")
        return submit is not None and is_whole and bool(submit.fingerprint)

    @property
    def may_be_known(self) -> bool:
        """Whether another call may have begun it."""
        return self.takes_over or self._resume is not None

    def copied(self, number: int, *, now: float) -> pb.Submit | None:
        """Return the copy with this number: what continues it for a call that resumes it, if this gateway and its
        output processor are lost together. None: its prompt is not kept."""
        if self._submit is None:
            return None
        submit = self._continued(number, now)
        if not self.keeps_journals:
            del submit.journals[:]
            submit.num_prompt_logprobs = 0
        return submit

    @property
    def keeps_journals(self) -> bool:
        """Whether a copy has its tokens."""
        assert self._submit is not None
        params = self._submit.sampling_params
        # Log probabilities are too many to be sent twice, and a call that resumes needs all of them: they are computed
        # anew, with the tokens.
        return not (params.HasField("logprobs") or params.HasField("prompt_logprobs"))

    def _continued(self, slot: int, now: float) -> pb.Submit:
        """Return its Submit with what the client has."""
        assert self._submit is not None
        submit = pb.Submit()
        # A copy: the message that was sent before may still wait to be serialized.
        submit.CopyFrom(self._submit)
        submit.slot = slot
        if submit.HasField("timeout"):
            left_ns = submit.timeout.ToNanoseconds() - round((now - self._started) * 1e9)
            submit.timeout.CopyFrom(_duration(left_ns))
        submit.engine_deaths = self.engine_deaths
        submit.num_prompt_logprobs = self.num_prompt_logprobs
        given = {journal.sample_index: journal for journal in self._submit.journals}
        del submit.journals[:]
        for sample_index in range(self.num_samples):
            # The journal is what the client has, 4 bytes a token. The next output processor replays it through its
            # detokenizer and stop strings, and sends only what is new, at whichever frame the stream broke.
            journal = self.collector.journal(self.first_index + sample_index, sample_index)
            if journal.token_ids or journal.emitted_text_bytes or journal.finished:
                if not submit.fingerprint:  # no call resumes it, and an end may have the experts of all tokens
                    journal.ClearField("end")
                if (origin := self.origins.get(sample_index)) is not None:
                    journal.weights.extend(origin.weights)
                    journal.numerics, journal.mixed_numerics = origin.numerics, origin.is_mixed
                submit.journals.append(journal)
            elif sample_index in given:
                submit.journals.append(given[sample_index])
        return submit

    def lost(
        self,
        cause: Cause,
        address: str = "",
        *,
        is_back: Callable[[], bool] | None = None,
        ended_alone: Incarnation | None = None,
        connected: Collection[Incarnation] = (),
        was_wrong: bool = False,
    ) -> None:
        """Note that its output processor was lost. ``address``: its address; empty: it has ended the request.
        ``is_back``: as of :meth:`RetryDebt.failed`. ``ended_alone``: which one it was, if it seems to have ended, and
        this was the only request there. ``connected``: those that are connected now. ``was_wrong``: it was given up
        because of a frame that no output processor may send."""
        self.refused_by.clear()
        self.unknown_to.clear()
        self.sought_until, self.seeks_copy = 0.0, False
        self.is_accepted = True
        if address and self._submit is not None and self._submit.fingerprint:  # otherwise it ends with its stream
            self.left_at.add(address)
        made_progress = self.has_progressed
        self.debt.failed(cause, made_progress=made_progress, is_back=is_back)
        self._num_wrong = was_wrong if made_progress else self._num_wrong + was_wrong
        if made_progress:
            self._ended_alone.clear()
        # One that is back with the same epoch had not ended: it was only the connection that broke.
        self._ended_alone.difference_update(connected)
        if ended_alone is not None:
            self._ended_alone.add(ended_alone)
        if self._submit is None:
            message = "The output processor handling this request became unavailable, and its prompt was too large"
            self.fail(errors.Unavailable(f"{message} to be kept for another one; retry."))
        elif self._num_wrong >= MAX_WRONG:
            self.fail(errors.Internal("Output processors sent invalid messages again and again."))
        elif len(self._ended_alone) >= MAX_LOSSES_ALONE:
            message = f"{MAX_LOSSES_ALONE} output processors ended while they ran only this request"
            self.fail(errors.OutputProcessorKiller(f"{message}; report it to the operator before you send it again."))

    def lost_media(self, error: errors.TokenloomError) -> bool:
        """Note that the encoders do not have its files any more. Returns whether :meth:`restore` may bring them back;
        otherwise it has ended."""
        made_progress = self.has_progressed
        self._num_media_losses = 1 if made_progress else self._num_media_losses + 1
        self.is_accepted = True
        self.debt.failed(Cause.SILENT, made_progress=made_progress)
        if self._submit is not None and self.media is not None and self._num_media_losses <= MAX_MEDIA_LOSSES:
            return True
        self.fail(errors.Unavailable(error.message))
        return False

    async def restore(self) -> None:
        """Put its files at encoders again. Raises ``Unavailable``, or what refuses them."""
        assert self._submit is not None
        assert self.media is not None
        await self.media.restore(self._submit)

    @property
    def is_kept(self) -> bool:
        """Whether its prompt is within the budget, so that it is kept to the end."""
        return self._kept is not None

    @property
    def can_begin(self) -> bool:
        """Whether its prompt is there, with which an output processor may begin it."""
        return self._submit is not None

    def settle(self) -> None:
        """Forget a prompt beyond the budget once the search is over: an output processor has the request."""
        if self.sought_until:
            self._forget_unless_kept()

    def moved(self, stream: object, cause: Cause, error: errors.TokenloomError) -> None:
        """Note that an output processor refused to run it, or the rest of it. If it was sought, it has run there."""
        self.is_accepted = self.is_accepted or bool(self.sought_until)
        self.sought_until = 0.0
        self.unknown_to.clear()  # those that did not have it may run it
        self.refused(stream, cause, error)

    def refused(self, stream: object, cause: Cause, error: errors.TokenloomError) -> None:
        """Note that an output processor refused to run it, or the rest of it."""
        self.refused_by.append(stream)
        self.is_accepted = self.is_accepted or self._num_tokens() > 0
        self.debt.failed(cause)
        self._refusal = error
        if self._submit is None:
            self.fail(errors.Unavailable(error.message, retry_after=error.retry_after))

    def fail_as_refused(self) -> None:
        """End it because all output processors have refused it."""
        assert self._refusal is not None
        self.fail(errors.ResourceExhausted(self._refusal.message, retry_after=self._refusal.retry_after))

    def cancel(self) -> None:
        """End it because its output is not wanted any more. This has no effect if it has ended."""
        if self.withdraw is not None:
            self.withdraw()
        self.release()

    def fail(self, error: errors.TokenloomError) -> None:
        """End it with an error."""
        self.collector.fail(error)
        self.release()

    def release(self) -> None:
        """Forget the prompt, because the request has ended. A second call has no effect."""
        self._submit = None
        if self._kept is not None:
            self._kept.release()

    def _forget_unless_kept(self) -> None:
        if self._kept is None:
            self._submit = None

    @property
    def has_progressed(self) -> bool:
        """Return whether output has come since it was sent to the output processor that has it, or had it last."""
        return self._num_tokens() > self._num_tokens_sent

    def _num_tokens(self) -> int:
        return sum(self.collector.num_tokens(self.first_index + sample) for sample in range(self.num_samples))


def journal_bytes(journals: Iterable[pb.SampleJournal]) -> int:
    """Return the bytes of journals in a message, about. An end may have the experts of all tokens."""
    return sum(4 * len(each.token_ids) + (each.end.ByteSize() if each.finished else 0) for each in journals)


def _resume(submit: pb.Submit) -> pb.Resume:
    return pb.Resume(
        request_id=submit.request_id,
        tenant=submit.tenant,
        num_samples=submit.num_samples,
        fingerprint=submit.fingerprint,
    )


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(nanoseconds, 0))
    return duration
