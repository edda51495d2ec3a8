"""Makes requests of records again, and computes a share of those that have ended on another engine (``--verify``).

An engine that computes wrongly, because its memory has changed, gives answers that look like right ones.
Where engines compute the same tokens for the same request, a second one finds it. It computes all anew: it may neither
hit what clients' requests have left in its cache, nor leave them anything.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.json_format import ParseDict, ParseError
from msgspec import msgpack
from msgspec.structs import replace

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.request.request_records import RecordedOutput, RecordedRequest, repeats_exactly
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1.engine_pb2 import Finished, KVGrant, KVSource
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import FinishReason, Logprobs, Pooled, SamplingParams

from ..placement.engine_link import EngineAttempt
from ..placement.last_snapshot import EngineKey
from ..placement.placement import Placer
from .request_stages import make_add
from .requests import params_of_later
from .telemetry import Outcome

log = logging.getLogger(__name__)

MOST_WAITING_BYTES: Final = 32 << 20
"""Memory of the records that wait, which are packed; what is beyond it is dropped."""
AT_ONCE: Final = 2
"""Requests that are computed again at a time: rows in the steps of engines that have time to spare."""
PATIENCE_SECONDS: Final = 60.0
"""How long a request waits for an engine with time to spare before it is dropped."""
OPINION_SECONDS: Final = 10.0
"""The same of each further engine, once two have computed different tokens."""
CALM_SECONDS: Final = 10.0
"""How long nothing must have been dropped before the fall-back ends."""
LOOK_SECONDS: Final = 0.25
"""How often it is looked whether an engine has time to spare, and whether it still has."""
MOST_QUARANTINES: Final = 3
"""Engines that this process ends within :data:`QUARANTINE_SECONDS`: more at once are rather engines of one kind that do
not compute alike than broken ones, and a mesh without engines serves no request."""
QUARANTINE_SECONDS: Final = 3600.0
_LOWEST_PRIORITY = (1 << 31) - 1
_CUT_SHORT = ("abort", "error")
"""Ends that nothing but the tokens before them can be compared of."""
_FAILURES = (
    FinishReason.FINISH_REASON_ERROR,
    FinishReason.FINISH_REASON_ABORT,
    FinishReason.FINISH_REASON_PREFILLED,
)


def compared_outputs(record: RecordedRequest) -> list[RecordedOutput]:
    """Return the outputs that have tokens to compare."""
    return [output for output in record.outputs if output.token_ids]


def is_cut_short(record: RecordedRequest, output: RecordedOutput) -> bool:
    """Return whether nothing but the tokens of an output can be compared: its end was none of the model's."""
    return record.is_half or output.finish_reason in _CUT_SHORT


def request_of(record: RecordedRequest) -> Submit:
    """Return the request as the output processor had it, but for texts and media. Raises ``ValueError`` that says why
    it cannot be computed again."""
    if record.left_out:
        raise ValueError(f"{' and '.join(record.left_out)} are not recorded")
    if any(len(output.weights) > 1 for output in record.outputs):
        raise ValueError("its weights were replaced while it ran (a pause in the mode keep)")
    submit = _submit_of(record)
    params = submit.sampling_params
    if not params.HasField("seed") and (params.temperature or not params.HasField("temperature")):
        raise ValueError("it has no seed, by which its tokens were drawn")
    if not compared_outputs(record):
        raise ValueError("it has generated no token")
    return submit


def _submit_of(record: RecordedRequest) -> Submit:
    submit = Submit(request_id=record.id)
    prompt = submit.prompt
    prompt.token_ids.extend(record.prompt)
    prompt.reasoning_start = record.reasoning_start  # type: ignore[assignment]
    prompt.adapter = bytes.fromhex(record.adapter)
    prompt.cache_salt = adapter_salt(b"", prompt.adapter)
    try:
        ParseDict(record.sampling_params, submit.sampling_params)
        ParseDict(record.text_options, submit.text)
    except ParseError as error:
        raise ValueError(f"its parameters are not those of this release: {error}") from None
    return submit


def params_of_output(submit: Submit, record: RecordedRequest, output: RecordedOutput) -> SamplingParams:
    """Return the parameters with which an output is computed again."""
    params = params_of_sample(submit, output.index)
    # The engine's context may have ended it, which is another one elsewhere.
    if is_cut_short(record, output) or output.finish_reason == "length":
        limit_tokens(params, len(output.token_ids))
    return params


def params_of_sample(submit: Submit, index: int) -> SamplingParams:
    """Return a copy of the parameters of a sample."""
    params = SamplingParams()
    params.CopyFrom(params_of_later(submit, index) if index else submit.sampling_params)
    return params


def limit_tokens(params: SamplingParams, num_tokens: int) -> None:
    """Let an output end after so many tokens, if it has not ended before."""
    params.max_tokens = num_tokens
    params.min_tokens = min(params.min_tokens, num_tokens)


class Mismatch(NamedTuple):
    """The first token in which an output differs from its record; None: the output had ended."""

    position: int
    recorded: int | None
    found: int | None

    def __str__(self) -> str:
        recorded, found = ("the end" if each is None else each for each in (self.recorded, self.found))
        return f"token {self.position} is {found} instead of {recorded}"


class Opinion(NamedTuple):
    """What an engine computes for an output that another one has computed."""

    key: EngineKey
    mismatch: Mismatch | None


class _Recomputed:
    """Compares what an engine computes with an output, token by token. Fulfils ``AttemptOwner``.

    Attributes:
        ended: The first mismatch; None: there is none. Or ``Unavailable``: the engine has not computed it to its end.
            Cancelled where it is to be rid of what it runs.
    """

    def __init__(self, output: RecordedOutput) -> None:
        self.ended: asyncio.Future[Mismatch | None] = asyncio.get_running_loop().create_future()
        self._expected = output.token_ids
        self._num_equal = 0

    def on_kv_granted(self, attempt: EngineAttempt, kv: KVSource) -> None:
        raise WrongFrame("the engine lends KV that nobody asked for")

    def on_moving(self, attempt: EngineAttempt, grant: KVGrant) -> None:
        self.ended.cancel()

    def on_prompt_logprobs(self, attempt: EngineAttempt, token_index: int, logprobs: Logprobs) -> None:
        raise WrongFrame("the engine sent log probabilities that nobody asked for")

    def on_pooled(self, attempt: EngineAttempt, part: Pooled) -> None:
        raise WrongFrame("the engine pooled a request that generates")

    def on_tokens(
        self, attempt: EngineAttempt, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        if self.ended.done():
            return
        if token_index != self._num_equal:
            raise WrongFrame("the engine skipped or repeated tokens")
        for token in token_ids:
            expected = self._expected[self._num_equal] if self._num_equal < len(self._expected) else None
            if token != expected:
                self.ended.set_result(Mismatch(self._num_equal, expected, token))
                return
            self._num_equal += 1

    def on_finished(self, attempt: EngineAttempt, finished: Finished) -> None:
        if self.ended.done():
            return
        if finished.reason in _FAILURES:
            self._fail()
        elif self._num_equal < len(self._expected):
            self.ended.set_result(Mismatch(self._num_equal, self._expected[self._num_equal], None))
        else:
            self.ended.set_result(None)

    def on_lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
        if not self.ended.done():
            self._fail()

    def _fail(self) -> None:
        self.ended.set_exception(errors.Unavailable("the engine has not computed the request to its end"))


class Verifier:
    """Computes records again, one after the other, on engines with time to spare; says of engines that differ which one
    is wrong, and lets that one end."""

    def __init__(
        self,
        placer: Placer,
        share: float,
        salt: bytes,
        *,
        count: Callable[[Outcome], object],
        fall_backs: FallBacks,
    ) -> None:
        """Args:
        share: Of the requests, in (0, 1].
        salt: Sets the cached prefixes of what is computed again apart from those of clients.
        count: Called with what has become of each sampled request.
        """
        self._placer = placer
        self._limit = round(share * (1 << 32))
        self._salt = salt
        self._count = count
        self._fall_backs = fall_backs
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()  # ids and records; bounded by its bytes
        self._num_bytes = 0
        self._dropped_at = 0.0  # the last time, by the event loop
        self._quarantined: dict[EngineKey, float] = {}  # when, by the event loop; those of the last hour
        self._unsettled: dict[str, asyncio.TimerHandle] = {}  # until when it is shown, by engines

    def wants(self, request_id: str) -> bool:
        """Return whether a request is one of the share. Thread-safe."""
        # By its id, which is random: every output processor that works on a request decides alike.
        return zlib.crc32(request_id.encode()) < self._limit

    def offer(self, record: RecordedRequest) -> None:
        """Take a request that has ended. One that finds too many before it is dropped."""
        packed = msgpack.encode(_ids_of(record))  # a grammar may be larger than all tokens
        if self._num_bytes + len(packed) > MOST_WAITING_BYTES:
            self._end(record.id, "dropped", "requests end faster than they are computed again")
            return
        self._num_bytes += len(packed)
        self._waiting.put_nowait((record.id, packed))

    async def run(self) -> None:
        """Compute requests again until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._work())
        finally:
            for timer in self._unsettled.values():
                timer.cancel()

    async def _work(self) -> None:
        while True:
            request_id, packed = await self._waiting.get()
            try:
                outcome, reason = await self._verify(msgpack.decode(packed, type=RecordedRequest))
            except Exception:  # a fault of one request never ends the verification of others
                log.exception("request %s cannot be computed again because of a bug", request_id)
                outcome, reason = "dropped", "a bug, which the log names"
            self._num_bytes -= len(packed)
            self._end(request_id, outcome, reason)

    def _end(self, request_id: str, outcome: Outcome, reason: str) -> None:
        self._count(outcome)
        now = asyncio.get_running_loop().time()
        if reason:
            log.debug("request %s was not computed again: %s", request_id, reason)
            self._dropped_at = now
            self._fall_backs.begin("unverified", reason)
        elif now - self._dropped_at >= CALM_SECONDS:
            self._fall_backs.end("unverified")

    async def _verify(self, record: RecordedRequest) -> tuple[Outcome, str]:
        """Compute a request again. Returns what has become of it, and why if it was not computed again."""
        try:
            submit = request_of(record)
        except ValueError:  # of its own, as an image: it says nothing of the mesh
            return "unfit", ""
        if record.is_half:  # an engine of another mesh may have computed the rest
            return "unfit", ""
        for output in compared_outputs(record):
            if reason := _unfit(output, submit.sampling_params):
                return "unfit", reason
        submit.prompt.cache_salt = adapter_salt(self._salt, submit.prompt.adapter)
        submit.tenant = record.tenant  # who pays for it, and whose turns in an engine's steps it takes
        for output in compared_outputs(record):
            case = _Case(self._placer, record, output, submit)
            opinion = await case.ask(PATIENCE_SECONDS, exclude=case.suspects)
            if opinion is None:
                reason = "no engine that computes alike and had no part in a request had time within"
                return "dropped", f"{reason} {PATIENCE_SECONDS:g} s"
            if opinion.mismatch is not None:
                await self._settle(case, opinion.key, opinion.mismatch)
                return "different", ""
        return "equal", ""

    async def _settle(self, case: "_Case", other: EngineKey, found: Mismatch) -> None:
        """Say which of the engines that differ is wrong, and let it end."""
        names = ", ".join(sorted(key.engine_id for key in case.suspects))
        what = f"request {case.record.id}, output {case.output.index}, computed on {names}"
        what = f"{what}: on {other.engine_id} {found}"
        wrong, why = await judged(case, other, found)
        log.error("wrong_tokens: %s; %s", what, why)
        if wrong is None and self._quarantined.keys().isdisjoint(case.suspects_of(found)):
            self._show(f"{names}, {other.engine_id}", f"{what}; {why}")
        if wrong is None:
            return
        now = asyncio.get_running_loop().time()
        self._quarantined = {key: at for key, at in self._quarantined.items() if now - at < QUARANTINE_SECONDS}
        if wrong in self._quarantined:  # of a request that it has computed before it ended
            return
        if len(self._quarantined) >= MOST_QUARANTINES:
            self._show(wrong.engine_id, f"{what}; {why}; {MOST_QUARANTINES} engines have ended for it in an hour")
            return
        self._quarantined[wrong] = now
        if not await self._placer.quarantine(wrong, f"{what}; {why}"):
            self._show(wrong.engine_id, f"{what}; {why}; it runs without --verify and does not end: restart it")

    def _show(self, engines: str, detail: str) -> None:
        """Show for an hour that engines differ and serve all the same."""
        self._fall_backs.begin("unsettled_tokens", detail, engines)
        if (timer := self._unsettled.pop(engines, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._unsettled[engines] = loop.call_later(QUARANTINE_SECONDS, self._forget, engines)

    def _forget(self, engines: str) -> None:
        del self._unsettled[engines]
        self._fall_backs.end("unsettled_tokens", engines)


def _ids_of(record: RecordedRequest) -> RecordedRequest:
    """Return a record without what nothing is compared with: log probabilities, texts and times."""
    without: dict[str, Any] = {"text": None, "logprobs": [], "prompt_logprobs": [], "timeline": {}}
    outputs = [replace(output, **without) for output in record.outputs]
    return replace(record, prompt_text=None, outputs=outputs)


def _unfit(output: RecordedOutput, params: SamplingParams) -> str:
    """Return why no other engine is sure to compute the same tokens; empty: it is."""
    if output.is_mixed or output.num_given:
        return (
            "requests that several kinds of engines, or a lost output processor, have computed are not computed again"
        )
    is_greedy = params.HasField("temperature") and not params.temperature
    for leg in output.legs:
        if not repeats_exactly(leg.numerics, leg.kv_layout):
            return f"engines that compute as {leg.numerics} may draw other tokens; --batch-invariant ones do not"
        if leg.draws_by_drafts and not is_greedy:
            return "drafts change what is drawn (rejection_sample_method probabilistic)"
    return "" if output.legs else "no engine is known to have computed it"


class _Case:
    """Asks engines what they compute for one output.

    Attributes:
        suspects: The engines that have computed the output.
    """

    def __init__(self, placer: Placer, record: RecordedRequest, output: RecordedOutput, submit: Submit) -> None:
        self.record = record
        self.output = output
        self.suspects = frozenset(EngineKey(leg.engine, leg.epoch) for leg in output.legs)
        self._placer = placer
        self._submit = submit
        serves = output.legs[-1]
        self._pool = placer.pool_of(bytes.fromhex(serves.weights), serves.numerics)
        self._params = params_of_output(submit, record, output)
        for name in ("logprobs", "prompt_logprobs", "logprob_token_ids", "return_routed_experts"):
            self._params.ClearField(name)
        if submit.text.stop:  # strings are looked for behind the engine, which would go on
            limit_tokens(self._params, len(output.token_ids))

    def suspects_of(self, mismatch: Mismatch) -> frozenset[EngineKey]:
        """Return the engines on whose KV a token depends: not those that were lost before, or took over later."""
        legs = [leg for leg in self.output.legs if leg.start <= mismatch.position]
        begin = max((number for number, leg in enumerate(legs) if leg.kind != "decode"), default=0)
        return frozenset(EngineKey(leg.engine, leg.epoch) for leg in legs[begin:])

    async def ask(
        self, patience: float, *, exclude: Collection[EngineKey] = (), only: EngineKey | None = None
    ) -> Opinion | None:
        """Return what an engine computes, or the one that is asked for. None: none had time within ``patience``
        seconds, or each has failed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while True:
            attempt = await self._placer.place_quiet(self._submit, self._pool, exclude, only)
            if attempt is not None:
                try:
                    if (found := await self._compute(attempt)) is not None:
                        return found
                except errors.Unavailable:
                    exclude = {*exclude, attempt.link.key}
            if loop.time() >= until:
                return None
            await asyncio.sleep(LOOK_SECONDS)

    def _can_repeat(self, attempt: EngineAttempt) -> bool:
        is_greedy = self._params.HasField("temperature") and not self._params.temperature
        is_exact = repeats_exactly(attempt.link.serves.numerics, attempt.link.serves.kv_layout)
        # One with a shorter context would end the output early, as if it had found another end.
        num_tokens = len(self.record.prompt) + len(self.output.token_ids)
        fits = num_tokens <= attempt.link.longest_request
        return is_exact and fits and (is_greedy or not attempt.link.identity.draws_by_drafts)

    async def _compute(self, attempt: EngineAttempt) -> Opinion | None:
        """Compute the output; None: clients wait for the engine's time, or it is to be rid of what it runs. Raises
        ``Unavailable`` if it cannot."""
        if not self._can_repeat(attempt):
            raise errors.Unavailable("the engine is not sure to compute the same tokens")
        owner, link = _Recomputed(self.output), attempt.link
        request = make_add(
            self._submit,
            self._params,
            (),
            pick=None,
            seconds_left=None,
            hold_kv=False,
            kv_source=None,
            awaits_tokens=False,
        )
        if link.identity.limits.priorities:
            request.priority = _LOWEST_PRIORITY
        try:
            link.add(request, attempt, owner)
            while not owner.ended.done():
                await asyncio.wait([owner.ended], timeout=LOOK_SECONDS)
                if not owner.ended.done() and self._placer.is_crowded(link.key):
                    return None
            return None if owner.ended.cancelled() else Opinion(link.key, owner.ended.result())
        finally:
            link.abort(attempt)


async def judged(case: _Case, other: EngineKey, found: Mismatch) -> tuple[EngineKey | None, str]:
    """Return which engine is wrong, None if that is not known, and why. ``other``: the engine that was asked, which has
    ``found`` another token.

    A third engine decides, where there is one. Otherwise those that have computed the output compute it once more: one
    that does not come to the same again had changed, and so had one that alone stands by it.
    """
    suspects = case.suspects_of(found)
    third = await case.ask(OPINION_SECONDS, exclude={*suspects, other})
    if third is not None and third.mismatch is None:
        return other, f"{third.key.engine_id} computes it as recorded"
    if third is not None and third.mismatch == found and len(suspects) == 1:
        return next(iter(suspects)), f"{third.key.engine_id} computes the same as {other.engine_id}"
    asked = [await case.ask(OPINION_SECONDS, only=key) for key in sorted(suspects)]
    again = [each for each in asked if each is not None]
    if len(asked) == 1 and again and again[0].mismatch is not None:
        return again[0].key, f"{again[0].key.engine_id} computes it otherwise now"
    if len(asked) > 1 and len(again) == len(asked):
        unlike = [each for each in again if each.mismatch != found]
        if len(unlike) == 1:
            return unlike[0].key, f"it alone does not compute the same as {other.engine_id}"
        if not any(each.mismatch for each in again):
            return other, "the engines that have computed it compute it as recorded again"
    once_more = await case.ask(OPINION_SECONDS, only=other)
    if once_more is not None and once_more.mismatch != found:
        return other, f"{other.engine_id} computes it otherwise now"
    return None, "which engine is wrong is not known"
