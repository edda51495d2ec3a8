"""The legs of one request: one engine does all of it, or one its prompt and first token and another what follows."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from tokenloom.request import errors
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVSource
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, FinishReason, Logprobs, SamplingParams

from ..placement.last_snapshot import EngineKey
from ..placement.placement import Asked, Placement, Placer
from .leg import Leg
from .request_state import RequestState

log = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 2
"""Engines that may die with a request on them: then it may be what kills them, and ends."""

_PREFILL, _DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


class LegsOwner(Protocol):
    """The request whose legs these are. It closes them when it ends."""

    @property
    def state(self) -> RequestState: ...

    def on_prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> None:
        """Of prompt tokens; a leg that replaces another tells them again."""

    def on_tokens(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None) -> None:
        """New tokens, of whichever leg."""

    def on_finished(self, finished: Finished) -> None:
        """The last leg ended."""

    def on_retry(self) -> None:
        """An engine died; another does its part."""

    def on_lost(self) -> None:
        """An engine died and no other can do its part."""

    def fail(self, error: BaseException) -> None:
        """It cannot go on."""


class Legs:
    """From ``start`` to ``close``. A request is prefilled, handed over and decoded:

    - The prefill leg ends with the first token and leaves the prompt's KV under a lease. The decode leg is placed then,
      or as soon as the KV is granted when the prefill takes more than a step: it pulls while the rest is computed.
    - Should the engine of the prefill leg be the best to decode too, the decode leg finds the KV in its prefix cache.
    - An engine that dies before its leg is over is replaced, as long as no token would have to be taken back.
    """

    def __init__(
        self,
        submit: Submit,
        owner: LegsOwner,
        placer: Placer,
        tasks: Tasks,
        deadline: float | None,
        *,
        params: SamplingParams | None = None,
        on_settled: Callable[[Placement], None] | None = None,
    ) -> None:
        """``tasks`` own the placements. ``deadline``: monotonic seconds. ``params``: of this sample, by default the
        request's. ``on_settled``: told, once, the engine that has the prompt's KV, or is computing it, and goes on from
        there; other samples of the prompt may join."""
        self._submit = submit
        self._params = params or submit.sampling_params
        self._on_settled = on_settled
        self._owner = owner
        self._placer = placer
        self._tasks = tasks
        self._deadline = deadline
        self._prefill: Leg | None = None  # or the whole request's
        self._decode: Leg | None = None
        self._next: Placement | None = None  # of a decode leg on the engine that still prefills
        self._kv: KVSource | None = None
        self._handed_over = False
        self._holds_kv = False  # on the prefill leg's engine, for nobody else to end
        self._placing = 0  # number of the placement under way; 0: none
        self._num_placements = 0
        self._deaths = submit.engine_deaths
        self._exclude: list[EngineKey] = []  # engines that died with it: bounded like the deaths
        self._pool: Fingerprint | None = None

    def start(self, asked: Asked | None = None) -> None:
        """Finds an engine for the beginning, or for all of it. ``asked``: the coordinator knows already."""
        self._place(_PREFILL, asked)

    def join(self, placement: Placement) -> None:
        """Does all of it where another sample of the prompt has settled."""
        self._place_prefill(placement)

    def stop_at(self, num_tokens: int) -> None:
        """A stop string was found in the output."""
        if (leg := self._decode if self._handed_over else self._prefill) is not None:
            leg.stop_at(num_tokens)

    def close(self) -> None:
        """Frees what is held, on every engine. Nothing is heard of any leg any more."""
        self._placing = 0
        self._end_decode()
        if self._prefill is not None:
            self._end(self._prefill)
        self._drop_kv()

    # Placing

    def _place(self, role: EngineRole, asked: Asked | None = None) -> None:
        """Begins a placement; one that was under way comes to nothing."""
        self._num_placements += 1
        self._placing = self._num_placements
        name = f"place {self._submit.request_id}"
        self._tasks.spawn(self._run_placement(role, self._placing, asked), name=name)

    async def _run_placement(self, role: EngineRole, number: int, asked: Asked | None) -> None:
        """Whatever goes wrong is this request's end, not the stream's."""
        started = time.monotonic_ns()
        state = self._owner.state
        is_ahead = role == _DECODE and not self._handed_over
        try:
            placement = await self._placer.place(
                self._submit,
                role,
                num_output_tokens=len(state.token_ids),
                pool=self._pool if role == _DECODE or state.token_ids else None,
                exclude=self._exclude,
                asked=asked,
            )
            if number != self._placing:  # ended or begun anew meanwhile
                self._placer.release(placement)
                return
            self._placing = 0
            state.timeline.placement_ns += time.monotonic_ns() - started
            self._place_decode(placement) if role == _DECODE else self._place_prefill(placement)
            request_log = RequestLog(log, self._submit.request_id, self._submit.trace_headers)
            request_log.debug("%s placed on %s", EngineRole.Name(role), placement.link.identity.engine_id)
        except Exception as error:
            if not is_ahead:
                self._owner.fail(error)
            elif number == self._placing:  # tried again when it is due
                self._placing = 0
                if self._handed_over:
                    self._place(_DECODE)

    def _place_prefill(self, placement: Placement) -> None:
        timeline, identity = self._owner.state.timeline, placement.link.identity
        timeline.prefill_engine = timeline.decode_engine = identity.engine_id
        self._pool = identity.fingerprint
        accepted = self._owner.state.token_ids
        self._prefill = Leg(self, placement, len(accepted))
        self._send(self._prefill, self._request(placement, accepted, hold_kv=not placement.whole_request))
        # What is told of the prompt comes before any sample's tokens.
        if placement.whole_request and not self._params.HasField("prompt_logprobs"):
            self._settle(placement)

    def _place_decode(self, placement: Placement) -> None:
        prefill, journal = self._prefill, self._owner.state.token_ids
        assert prefill is not None
        self._owner.state.timeline.decode_engine = placement.link.identity.engine_id
        is_same = placement.key == prefill.placement.key
        if is_same and not self._handed_over:
            self._next = placement
            return
        # One that comes ahead gets the tokens of the prefill leg, all of them, when that is over.
        accepted = journal if self._handed_over else journal[: prefill.num_accepted]
        self._decode = Leg(self, placement, len(accepted))
        request = self._request(
            placement, accepted, kv_source=None if is_same else self._kv, awaits_tokens=not self._handed_over
        )
        self._send(self._decode, request)
        if is_same:
            self._drop_kv()  # of which the prefix cache has a share

    def _send(self, leg: Leg, request: AddRequest) -> None:
        try:
            leg.send(request)
        except errors.Unavailable:
            self.on_lost(leg)

    def _request(
        self,
        placement: Placement,
        accepted: Sequence[int],
        *,
        hold_kv: bool = False,
        kv_source: KVSource | None = None,
        awaits_tokens: bool = False,
    ) -> AddRequest:
        timeout = None
        if self._deadline is not None:
            timeout = Duration()
            timeout.FromNanoseconds(max(0, int((self._deadline - time.monotonic()) * 1e9)))
        submit = self._submit
        return AddRequest(
            request_id=submit.request_id,
            prompt=submit.prompt,
            accepted_token_ids=accepted,
            sampling_params=self._params,
            priority=submit.priority,
            timeout=timeout,
            hold_kv=hold_kv,
            kv_source=kv_source,
            awaits_tokens=awaits_tokens,
            pick=placement.pick,
            trace_headers=submit.trace_headers,
        )

    def _settle(self, placement: Placement) -> None:
        if self._on_settled is not None:
            on_settled, self._on_settled = self._on_settled, None
            on_settled(placement)

    # What the engines say

    def on_kv_granted(self, leg: Leg, kv: KVSource) -> None:
        """The prefill takes a while: the decode leg may begin to read."""
        if self._kv is None and leg is self._prefill:
            self._kv = kv
            self._place(_DECODE)

    def on_prompt_logprobs(self, leg: Leg, token_index: int, logprobs: Logprobs) -> None:
        self._owner.on_prompt_logprobs(token_index, logprobs)

    def on_tokens(self, leg: Leg, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None) -> None:
        if leg is self._decode:
            self._holds_kv = False  # whoever decodes has read it
            self._settle(leg.placement)  # and verified it: whoever joins hits it
        elif self._on_settled is not None and leg.placement.whole_request:
            self._settle(leg.placement)
        self._owner.on_tokens(token_index, token_ids, logprobs)

    def on_finished(self, leg: Leg, finished: Finished) -> None:
        self._placer.release(leg.placement)
        if finished.reason != FinishReason.FINISH_REASON_PREFILLED:
            self._owner.on_finished(finished)
            return
        self._holds_kv = leg is self._prefill
        if self._owner.state.stop_match is not None:
            self._owner.on_finished(finished)
        else:
            self._hand_over(leg, finished)

    def on_lost(self, leg: Leg) -> None:
        self._placer.release(leg.placement)
        self._deaths += 1
        is_decoding = leg is self._decode and leg.has_output
        is_final = leg.placement.whole_request or is_decoding or self._deaths >= MAX_ENGINE_DEATHS
        if is_final or self._owner.state.stop_match is not None:
            self._owner.on_lost()
            return
        self._owner.on_retry()
        self._exclude.append(leg.placement.key)
        if leg is self._decode:
            self._decode = None
            self._place(_DECODE)
        else:
            self._end_decode()
            self._kv = None
            self._place(_PREFILL)

    def _hand_over(self, leg: Leg, finished: Finished) -> None:
        """The first token is there: it goes on where its decode leg is, or will be."""
        state = self._owner.state
        if leg is not self._prefill or not leg.num_accepted < len(state.token_ids) == finished.num_output_tokens:
            self._owner.fail(errors.Internal("the engine's first token is missing"))
            return
        state.prefilled(finished)
        self._handed_over = True
        self._kv = finished.kv if finished.HasField("kv") else None
        if self._decode is not None:
            self._decode.accept(state.token_ids[leg.num_accepted :])
        elif self._next is not None:
            placement, self._next = self._next, None
            self._place_decode(placement)
        elif not self._placing:
            self._place(_DECODE)

    # Ending

    def _end(self, leg: Leg) -> None:
        if leg.is_live:
            leg.abort()
            self._placer.release(leg.placement)

    def _end_decode(self) -> None:
        if self._decode is not None:
            self._end(self._decode)
            self._decode = None
        if self._next is not None:
            self._placer.release(self._next)
            self._next = None

    def _drop_kv(self) -> None:
        if self._holds_kv and self._prefill is not None:
            self._holds_kv = False
            self._prefill.drop_kv()
