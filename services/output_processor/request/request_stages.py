"""Runs one sample on one engine, or on two: the first computes the prompt and the first token, the other one the rest.

What one engine computes of a sample is called a leg, here and in the protos: the prefill leg, the decode leg. The
decode leg names the engine that has the KV of the prompt, and its own engine pulls it
(``services/engine/kv/kv_loads.py``).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVGrant, KVSource, PickId
from tokenloom.v1.output_processor_pb2 import KVHandover, RequestFinished, Submit
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, FinishReason, Logprobs, Pooled, SamplingParams

from ..placement.engine_link import EngineAttempt
from ..placement.engine_search import EngineSearch, Lifetime
from ..placement.last_snapshot import EngineKey
from ..placement.placement import FirstPick, PendingPick, Placer
from .sample_output import SampleOutput
from .telemetry import Leg

log = logging.getLogger(__name__)

_PREFILL, _DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
_ERROR, _PREFILLED = FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_PREFILLED
_NO_ENDS = {FinishReason.FINISH_REASON_UNSPECIFIED, _PREFILLED, FinishReason.FINISH_REASON_TOOL_CALLS}
_ENDS = frozenset(FinishReason.values()) - _NO_ENDS


class RequestStages:
    """Runs one sample, from ``start`` or ``begin_on`` to its end. It is prefilled, handed over and decoded:

    - The prefill leg ends with the first token and leaves the prompt's KV under a lease. The decode leg is placed then,
      or as soon as the KV is granted when the prefill takes more than a step: it pulls while the rest is computed.
    - If the engine of the prefill leg is the best one to decode too, the decode leg finds the KV in its prefix cache.
    - An engine that dies, drains or is full is replaced at any token. The sample then begins anew, as a request whose
      prompt is followed by the tokens so far. Only a decode leg that has sent nothing yet leaves the lease to the next.
    - An engine that wants to be rid of a running sample offers its KV. Its attempt is a prefill leg from then on, and
      the decode leg is placed elsewhere; if that fails before the hand-over, the attempt goes on where it is.

    Fulfils ``AttemptOwner``. The first reason to end wins, and frees what is held on every engine.
    """

    def __init__(
        self,
        submit: Submit,
        params: SamplingParams,
        output: SampleOutput,
        placer: Placer,
        tasks: Tasks,
        on_end: Callable[["RequestStages", RequestFinished], None],
        lifetime: Lifetime,
    ) -> None:
        """``tasks`` own the placements. ``on_end`` is called once. ``lifetime``: shared by the request's samples."""
        self._submit = submit
        self._params = params
        self._output = output
        self._placer = placer
        self._tasks = tasks
        self._on_end = on_end
        self._on_settled: Callable[[EngineAttempt], None] | None = None
        self._lifetime = lifetime
        self._search = EngineSearch(
            *(placer.budget, lifetime, submit.num_samples or 1, placer.is_shared, output.engine_died),
            check=placer.check,
            is_open=placer.is_open,
        )
        self._prefill: EngineAttempt | None = None  # or the attempt that does the whole request
        self._decode: EngineAttempt | None = None
        self._next: EngineAttempt | None = None  # a decode leg that waits, because its engine still prefills
        self._kv: KVSource | None = None
        self._handed_over = False
        self._is_moving = False  # the prefill leg is an attempt that ran, and may go on if it keeps the sample
        self._holds_kv = False  # the prefill leg's engine keeps it until it is read or dropped
        self._half = submit.kv_transfer if submit.HasField("kv_transfer") else None
        self._placement: asyncio.Task[None] | None = None  # the one under way
        self._pool: Fingerprint | None = None
        self._pool_before: Fingerprint | None = None  # of what the sample continues without tokens of its own
        self.ended = False

    def start(self, pick: FirstPick = None, on_settled: Callable[[EngineAttempt], None] | None = None) -> None:
        """Find an engine. If the sample continues, :meth:`replay` comes first.

        Args:
            pick: What is known of the first engine.
            on_settled: Called once, with the attempt whose engine has or computes the prompt's KV and decodes from it.
                Other samples of the prompt may run there.
        """
        self._on_settled = on_settled
        if self._half is not None:
            self._start_half(self._half)
            return
        if self._lifetime.num_deaths and (verdict := self._search.verdict()) is not None:
            self.fail(verdict)
            return
        # With a single engine every pick chooses it, and the message to the coordinator and back costs 0.6 ms of the
        # time to the first token: 49 instead of 53 µs of CPU a token at 64 streams and steps of 4 ms.
        attempt = self._placer.at_once(self._submit) if pick is None else pick
        if not isinstance(attempt, EngineAttempt):
            self._place(_PREFILL, attempt)
            return
        try:
            self.begin_on(attempt)
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)

    def _start_half(self, half: KVHandover) -> None:
        """Start the first or the second half of a request, whose other half is another request."""
        output = self._output
        if half.hold and output.token_ids:
            self.fail(_lost_prefill())
            return
        if half.hold or output.token_ids:  # with tokens that the client has it continues as any request does
            self._place(_PREFILL)
            return
        try:
            # As if its engine had been placed here: it goes on where engines compute alike and can read the KV.
            self._pool = self._pool_of_source(half.source)
            if self._pool is not None:
                output.compute_with(self._pool)
            if output.add(0, [half.first_token_id], None) is not None:
                self._end(output.stop)
                return
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)
            return
        output.timeline.prefill_engine = half.source.engine_id
        self._kv, self._handed_over = half.source, True
        self._place(_DECODE)

    def _pool_of_source(self, source: KVSource) -> Fingerprint | None:
        """Return what the engine served when it computed KV; None: not known."""
        serves = self._placer.pool_of_engine(EngineKey(source.engine_id, source.engine_epoch))
        if serves is None:
            return self._placer.pool_of(source.weights, "") if source.weights else None
        pool = Fingerprint()
        pool.CopyFrom(serves)
        # They may have been replaced since. Then the KV is gone, and the prompt is computed again with the old ones.
        pool.weights = source.weights or serves.weights
        return pool

    def replay(self) -> None:
        """Take the tokens that an output processor which was lost has sent; they may hold a stop string, which ends the
        sample. To be called before :meth:`start` or :meth:`begin_on`."""
        try:
            if self._output.replay() is not None:
                self._end(self._output.stop)
            else:
                # What a lost output processor has sent goes on with the weights that computed it, and where engines
                # compute alike.
                self._pool = self._pool_before = self._pool_so_far(self._output.weights)
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)

    def _pool_so_far(self, weights: Sequence[bytes]) -> Fingerprint | None:
        """Return what engines serve that may go on; None: any may. ``weights``: the last ones count."""
        known = weights[-1] if weights else b""
        return self._placer.pool_of(known, self._output.numerics) if known or self._output.numerics else None

    def cancel(self) -> None:
        """End because the gateway wants no more output."""
        self._end(self._output.abort)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self._end(self._output.fail, error)

    def _place(self, role: EngineRole, pick: PendingPick | None = None, *, is_retry: bool = False) -> None:
        """Begin a placement, which takes the place of the one under way. ``is_retry``: it was counted as an attempt."""
        self._cancel_placement()
        placement = self._run_placement(role, pick, is_retry)
        self._placement = self._tasks.spawn(placement, name=f"place {self._submit.request_id}")

    def _cancel_placement(self) -> None:
        if self._placement is not None:
            self._placement.cancel()
            self._placement = None

    async def _run_placement(self, role: EngineRole, pick: PendingPick | None, is_retry: bool) -> None:
        """Find an engine and send the leg. A failure ends this sample, never the gateway's stream."""
        output = self._output
        started = output.clock()
        try:
            attempt = await self._placer.place(
                self._submit,
                role,
                self._search,
                num_output_tokens=len(output.token_ids),
                pool=self._pool if role == _DECODE or output.token_ids else self._pool_before,
                pending=pick,
            )
            self._placement = None
            output.timeline.placement_ns += output.clock() - started
            self._send_decode(attempt) if role == _DECODE else self.begin_on(attempt)
        except Exception as error:
            self._placement = None
            if is_retry and isinstance(error, errors.EngineKiller):
                output.num_attempts -= 1  # counted when the engine was lost, and not made
            if role == _PREFILL or self._handed_over:  # otherwise it is placed again when it is due
                self.fail(error)

    def may_run_on(self, attempt: EngineAttempt) -> bool:
        """Return whether the engine of another sample's attempt has the weights that computed this one so far, and
        computes as the one did."""
        pool, serves = self._pool, attempt.link.serves
        return pool is None or (pool.weights in (b"", serves.weights) and pool.numerics in ("", serves.numerics))

    def begin_on(self, attempt: EngineAttempt) -> None:
        """Send the prefill leg, or all of the sample, to an engine."""
        timeline, identity = self._output.timeline, attempt.link.identity
        timeline.prefill_engine = timeline.decode_engine = identity.engine_id
        self._compute_in(attempt.link.serves)
        self._prefill = attempt
        holds = not attempt.whole_request or (self._half is not None and self._half.hold)
        self._send(attempt, self._output.token_ids, hold_kv=holds)
        # Log probabilities of the prompt come before any sample's tokens.
        if self._on_settled is not None and attempt.whole_request and not self._params.HasField("prompt_logprobs"):
            self._settle(attempt)

    def _compute_in(self, pool: Fingerprint) -> None:
        """Note what the engine serves that computes the next tokens."""
        self._pool = pool
        self._output.compute_with(pool)

    def _send_decode(self, attempt: EngineAttempt) -> None:
        prefill, journal = self._prefill, self._output.token_ids
        self._output.timeline.decode_engine = attempt.link.identity.engine_id
        if prefill is None:  # another request has computed the prompt
            assert self._kv is not None
            self._decode = attempt
            self._compute_in(attempt.link.serves)
            self._send(attempt, journal, kv_source=self._kv)  # the engine that has it ends its lease
            return
        is_same = attempt.link.key == prefill.link.key
        if self._handed_over and not self.may_run_on(attempt):
            self._compute_in(attempt.link.serves)
        # The decode leg would wait on the engine for the prefill leg that still runs there, and hold a second seat
        # meanwhile.
        if is_same and not self._handed_over:
            self._next = attempt
            return
        self._decode = attempt
        # If it is sent before the prefill leg has ended, it gets all tokens of that leg then. Of a sample that moves,
        # the last token follows too: it may be the last of the leg, whose end has not arrived yet.
        num_given = max(prefill.num_accepted, len(journal) - 1) if self._is_moving else prefill.num_accepted
        accepted = journal if self._handed_over else journal[:num_given]
        kv_source = None if is_same else self._kv
        self._send(attempt, accepted, kv_source=kv_source, awaits_tokens=not self._handed_over)
        if is_same:
            self._drop_kv()  # the prefix cache has a share of it

    def _send(
        self,
        attempt: EngineAttempt,
        accepted: Sequence[int],
        *,
        hold_kv: bool = False,
        kv_source: KVSource | None = None,
        awaits_tokens: bool = False,
    ) -> None:
        output, deadline = self._output, self._lifetime.deadline
        left = None if deadline is None else deadline - asyncio.get_running_loop().time()
        request = make_add(
            self._submit,
            self._params,
            accepted,
            pick=attempt.pick,
            seconds_left=left,
            hold_kv=hold_kv,
            kv_source=kv_source,
            awaits_tokens=awaits_tokens,
            routed_start=0 if output.routed is None else output.routed.next_start,
        )
        if attempt.session is not None:
            request.session.CopyFrom(attempt.session)
            if not output.token_ids:  # what was cached is counted of the first attempt too
                output.timeline.past_tokens = attempt.session.past_tokens
                output.timeline.kv_elsewhere = attempt.session.moved
                output.timeline.kv_from_store = attempt.session.from_store
        attempt.num_accepted = len(accepted)
        try:
            attempt.link.add(request, attempt, self)
        except errors.Unavailable:
            self.on_lost(attempt, is_alone=False)  # it never ran there
        else:
            if output.trail is not None:
                output.trail.legs.append(self._leg(attempt, len(accepted), hold_kv=hold_kv))
        if log.isEnabledFor(logging.DEBUG):
            request_log = RequestLog(log, self._submit.request_id, self._submit.trace_headers)
            request_log.debug("placed on %s", attempt.link.identity.engine_id)

    def _leg(self, attempt: EngineAttempt, start: int, *, hold_kv: bool) -> Leg:
        """Return what an attempt, which was sent, computes."""
        kind = "decode" if attempt is self._decode else "prefill" if hold_kv else "whole"
        return Leg(attempt.link.identity, attempt.slot, kind, start, attempt.link.serves)

    def _settle(self, attempt: EngineAttempt) -> None:
        if self._on_settled is not None:
            on_settled, self._on_settled = self._on_settled, None
            on_settled(attempt)

    def on_kv_granted(self, attempt: EngineAttempt, kv: KVSource) -> None:
        """Place the decode leg while the prefill leg still runs: its engine copies the complete blocks at once, and the
        others as the prefill completes them."""
        # A grant of an attempt that was replaced may still arrive, and names a lease of an engine that is lost.
        if self._kv is None and attempt is self._prefill and self._half is None:
            self._kv = kv
            self._place(_DECODE)

    def on_moving(self, attempt: EngineAttempt, grant: KVGrant) -> None:
        """Find another engine for a running attempt, whose engine goes on with it until the hand-over."""
        if not grant.HasField("kv"):
            if attempt is self._prefill and self._is_moving:
                self._call_off(attempt)
                self._is_moving = False
            return
        runs_here = attempt is (self._decode or self._prefill) and self._next is None and self._placement is None
        # Of a leg that has brought nothing yet it is not known whether it has the KV.
        if not runs_here or not attempt.link.moves_requests or not attempt.has_output or self._output.stop_match:
            attempt.link.keep(attempt)
            return
        self._offer(attempt)
        self._kv = grant.kv
        move = self._move(attempt, grant.target)
        self._placement = self._tasks.spawn(move, name=f"move {self._submit.request_id}")

    def _offer(self, attempt: EngineAttempt) -> None:
        """Take the attempt that runs for a prefill leg, which is handed over."""
        self._prefill, self._decode = attempt, None
        self._kv, self._handed_over, self._holds_kv = None, False, False
        self._is_moving = True

    async def _move(self, source: EngineAttempt, target: str) -> None:
        output = self._output
        try:
            attempt = await self._placer.place_move(
                self._submit, source.link.key, target, num_output_tokens=len(output.token_ids), pool=self._pool
            )
            if not (self.may_run_on(attempt) and attempt.link.moves_requests):
                self._placer.release(attempt)
                raise errors.Unavailable("The engine computes in another way; the request does not move there.")
            self._placement = None
            self._send_decode(attempt)
        except Exception as error:
            self._placement = None
            log.info("request %s does not move: %s", self._submit.request_id, wire_errors.of_exception(error).message)
            self._stay(source)

    def _stay(self, source: EngineAttempt) -> None:
        """Let a sample go on where it runs, because no engine takes it; after the hand-over, wherever there is one."""
        if self._handed_over:
            self._place(_DECODE)
            return
        self._call_off(source)
        source.link.keep(source)  # if its end is on its way, the sample is handed over all the same, to any engine

    def _call_off(self, source: EngineAttempt) -> None:
        """Forget the engine that was to go on."""
        self._cancel_placement()
        if self._decode is not None:
            self._note_start(self._decode, None)
        self._end_decode()
        self._kv = None
        self._output.timeline.decode_engine = source.link.identity.engine_id

    def on_prompt_logprobs(self, attempt: EngineAttempt, token_index: int, logprobs: Logprobs) -> None:
        try:
            self._output.add_prompt_logprobs(token_index, logprobs)
        except WrongFrame:
            raise
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)

    def on_pooled(self, attempt: EngineAttempt, part: Pooled) -> None:
        raise WrongFrame("the engine pooled a request that generates")

    def on_tokens(
        self, attempt: EngineAttempt, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        try:
            match = self._output.add(token_index, token_ids, logprobs)
        except WrongFrame:
            raise
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)
            return
        attempt.has_output = True
        if attempt is self._decode:
            self._holds_kv = False  # the engine that decodes has read it
        if self._on_settled is not None and (attempt is self._decode or attempt.whole_request):
            self._settle(attempt)  # the KV is verified: samples that join will hit it
        if match is not None:
            attempt.link.stop_at(attempt, match.num_tokens)

    def on_finished(self, attempt: EngineAttempt, finished: Finished) -> None:
        self._placer.release(attempt)
        try:
            self._finished(attempt, finished)
        except WrongFrame:
            raise
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)

    def _finished(self, attempt: EngineAttempt, finished: Finished) -> None:
        if finished.cpu_ns:
            self._output.timeline.cpu.engine_ns += finished.cpu_ns
        if self._is_target(attempt):
            self._stay_at_source()
            return
        if (routed := self._output.routed) is not None and finished.HasField("routed_experts"):
            routed.add(finished.routed_experts, len(self._output.token_ids))
        if (trail := self._output.trail) is not None and finished.preempted_at:
            trail.note_preemptions(attempt.link.identity.engine_id, attempt.slot, finished.preempted_at)
        is_prefilled = finished.reason == _PREFILLED
        self._holds_kv = self._holds_kv or (is_prefilled and attempt is self._prefill)
        if self._output.stop_match is not None:
            self._end(self._output.finish, finished)
        elif is_prefilled:
            self._hand_over(attempt, finished)
        elif finished.reason == _ERROR and self._search.refused(
            attempt,
            wire_errors.from_proto(finished.error),
            has_begun=attempt is not self._prefill or bool(self._output.token_ids),
        ):
            # The engine may have lost the old weights, and requests were to go on with new ones.
            has_weights = finished.error.reason != errors.WeightsReplaced.reason
            if not has_weights:
                self._pool = self._pool_so_far(())
            self._replace(attempt, has_weights=has_weights)
        elif finished.reason not in _ENDS:
            raise WrongFrame(f"{finished.reason} is no reason to finish")
        elif finished.reason != _ERROR and finished.num_output_tokens != len(self._output.token_ids):
            raise WrongFrame("the engine's last tokens are missing")
        else:
            self._end(self._output.finish, finished)

    def on_lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
        self._placer.release(attempt)
        try:
            self._search.lost(attempt, is_alone=is_alone)
            self._stay_at_source() if self._is_target(attempt) else self._replace(attempt)
        except Exception as error:  # the other requests of the engine are to learn of its loss, too
            self.fail(error)

    def _is_target(self, attempt: EngineAttempt) -> bool:
        """Return whether an attempt waits to take over from one that still runs."""
        return self._is_moving and attempt is self._decode and not self._handed_over

    def _stay_at_source(self) -> None:
        """Let the attempt go on that was to be handed over: the other one is lost, or was refused."""
        assert self._prefill is not None, "it moves"
        if self._decode is not None:
            self._note_start(self._decode, None)
            self._decode = None
        self._stay(self._prefill)

    def _note_start(self, attempt: EngineAttempt, start: int | None) -> None:
        if (trail := self._output.trail) is not None:
            trail.note_start(attempt.link.identity.engine_id, attempt.slot, start)

    def _replace(self, attempt: EngineAttempt, *, has_weights: bool = True) -> None:
        """Continue on another engine, unless the output is complete or the request may have killed its engines.
        ``has_weights``: whether there are engines with the weights that computed the KV so far."""
        if self._output.stop_match is not None:
            self._end(self._output.stop)
            return
        if (verdict := self._search.verdict()) is not None:
            self.fail(verdict)
            return
        if self._half is not None and self._half.hold and self._output.token_ids:
            self.fail(_lost_prefill())
            return
        self._output.retry()
        # Nothing of it reached the client, so the lease still holds all that the next decode leg needs. With tokens
        # sent, the lease covers only the prompt and the sample begins anew; with other weights the KV is useless.
        if attempt is self._decode and not attempt.has_output and has_weights:
            self._decode = None
            self._place(_DECODE, is_retry=True)
            return
        self._end_decode()
        self._drop_kv()
        self._kv = None
        self._handed_over = self._is_moving = False
        # As a new request whose prompt ends with the tokens so far, so no path exists that only failures take, and a
        # long output does not disturb the decodes of the next engine.
        self._place(_PREFILL, is_retry=True)

    def _hand_over(self, attempt: EngineAttempt, finished: Finished) -> None:
        """Continue on the engine of the decode leg, or place that leg: the first token has arrived."""
        output = self._output
        is_complete = attempt.num_accepted < len(output.token_ids) == finished.num_output_tokens
        if is_complete and attempt is self._decode and self._handed_over:
            self._offer(attempt)  # it was to move, and has ended before that could be said
            self._holds_kv = True
        if attempt is not self._prefill or not is_complete:
            raise WrongFrame("the engine's first token is missing")
        if self._half is not None and self._half.hold:
            self._holds_kv = False  # it is the caller's, and ends with its lease
            self._end(output.finish, finished)
            return
        output.prefilled(finished)
        output.timeline.moves += self._is_moving
        self._handed_over, self._is_moving = True, False
        self._kv = finished.kv if finished.HasField("kv") else None
        # The decode leg was placed while the prompt was still computed, so that it could copy blocks meanwhile; only
        # the first token was missing. For prompts of one step there is nothing to overlap, and it is placed now.
        if self._decode is not None:
            self._note_start(self._decode, len(output.token_ids))
            self._decode.link.accept(self._decode, output.token_ids[self._decode.num_accepted :])
        elif self._next is not None:
            following, self._next = self._next, None
            self._send_decode(following)
        elif self._placement is None:
            self._place(_DECODE)

    def _end(self, end_output: Callable[..., RequestFinished], *reason: object) -> None:
        """Free what is held on every engine, then report the end that ``end_output`` returns for ``reason``."""
        if self.ended:
            return
        self.ended = self._search.has_ended = True
        self._cancel_placement()
        self._end_decode()
        if self._prefill is not None:
            self._release(self._prefill)
        self._drop_kv()
        self._prefill = None  # whose owner this is: otherwise only the garbage collector would free the two
        try:
            finished = end_output(*reason)
        except Exception as error:  # it has ended, whatever its output is: its slot and its place are given back
            finished = self._output.fail(error)
        self._on_end(self, finished)

    def _end_decode(self) -> None:
        for attempt in filter(None, (self._decode, self._next)):
            self._release(attempt)
        self._decode = self._next = None

    def _release(self, attempt: EngineAttempt) -> None:
        attempt.link.abort(attempt)
        self._placer.release(attempt)

    def _drop_kv(self) -> None:
        if self._holds_kv and self._prefill is not None:
            self._holds_kv = False
            self._prefill.link.drop_kv(self._prefill)


def _lost_prefill() -> errors.Unavailable:
    """Return the error of a prefill whose one token is at the client: the KV of another attempt would be that of one
    token more."""
    return errors.Unavailable("The engine of this prefill was lost; send it again.")


def make_add(
    submit: Submit,
    params: SamplingParams,
    accepted: Sequence[int],
    *,
    pick: PickId | None,
    seconds_left: float | None,
    hold_kv: bool,
    kv_source: KVSource | None,
    awaits_tokens: bool,
    routed_start: int = 0,
) -> AddRequest:
    """Return the message; the link fills in the slot.

    Args:
        params: Those of this sample.
        accepted: Its output tokens so far.
        seconds_left: Until the request's deadline; None: it has none.
        hold_kv, kv_source, awaits_tokens: As in ``AddRequest``.
        routed_start: The position from which on the experts of tokens are missing, for a request that asks for them.
    """
    request = AddRequest(
        request_id=submit.request_id,
        accepted_token_ids=accepted,
        sampling_params=params,
        priority=submit.priority,
        hold_kv=hold_kv,
        kv_source=kv_source,
        awaits_tokens=awaits_tokens,
        pick=pick,
        trace_headers=submit.trace_headers,
        tenant=submit.tenant,
    )
    request.prompt.CopyFrom(submit.prompt)  # as an argument it would take twice the memory
    if seconds_left is not None:
        request.timeout.FromNanoseconds(max(0, int(seconds_left * 1e9)))
    if routed_start:
        request.sampling_params.routed_experts_prompt_start = routed_start
    return request
