"""Runs beam searches in the mesh: each step sends one request of one token for every beam of every prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenloom.request import errors, validation
from tokenloom.request.beam_search import (
    MAX_LENGTH_PENALTY,
    Beam,
    BeamCandidates,
    BeamSearch,
    BeamSettings,
    num_candidates,
)
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..mesh.collector import Collector, Delta, Outlet
from ..mesh.output_pool import Cancel, OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import BeamOptions, GenerateRequest, RestorableMedia

Row = output_processor_pb2.SlotTextLogprobs

_WITHOUT_EFFECT = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Nothing is drawn."""
_USED = frozenset({"max_tokens", "stop_token_ids", "logprobs", "skip_reading_prefix_cache"})
_NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
_ATTEMPTS = 3
"""How often a step is computed, if engines abort it."""
_TAIL = 8
"""Tokens of the prompt that are decoded with an output, because they decide how its text begins."""


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Says how the beams of a request continue."""

    length_penalty: float
    num_candidates: int
    """Next tokens that are considered after each beam."""


def plan_beams(request: GenerateRequest, options: BeamOptions, limits: types_pb2.ModelLimits) -> BeamPlan:
    """Return how to search. Raises ``InvalidArgument`` for what a beam search does not support, naming the field."""
    for descriptor, value in request.sampling.ListFields():
        name = descriptor.name
        if name not in _USED | _WITHOUT_EFFECT and value != _NEUTRAL.get(name):
            raise InvalidArgument(f"{name} is not available with beam search", name)
    has_no_spaces = (
        request.text.HasField("spaces_between_special_tokens") and not request.text.spaces_between_special_tokens
    )
    for name, is_set in (
        ("stop", bool(request.text.stop)),
        ("bad_words", bool(request.bad_words)),
        ("spaces_between_special_tokens", has_no_spaces),
    ):
        if is_set:
            raise InvalidArgument(f"{name} is not available with beam search", name)
    if not -MAX_LENGTH_PENALTY <= options.length_penalty <= MAX_LENGTH_PENALTY:  # NaN fails every comparison
        raise InvalidArgument(
            f"length_penalty must be a number from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}", "length_penalty"
        )
    top = num_candidates(
        request.num_samples,
        vocab_size=limits.vocab_size,
        max_logprobs=validation.max_logprobs(limits),
        field="n",
    )
    return BeamPlan(options.length_penalty, top)


class BeamTexts:
    """Decodes sequences with a tokenizer's help."""

    def __init__(self, tokenizers: TokenizerClient) -> None:
        self._tokenizers = tokenizers

    async def text_of(self, submit: output_processor_pb2.Submit, token_ids: Sequence[int]) -> str:
        """Return the text of an output; empty if the client wants none. Raises ``Unavailable``."""
        if not token_ids or (submit.text.HasField("detokenize") and not submit.text.detokenize):
            return ""
        skip = submit.text.skip_special_tokens if submit.text.HasField("skip_special_tokens") else True
        tail = submit.prompt.token_ids[-_TAIL:]
        head = await self._decode(tail, skip, submit.tenant)
        whole = await self._decode([*tail, *token_ids], skip, submit.tenant)
        # Where the prompt ends within a character, its own text ends in U+FFFD and does not begin the whole text.
        return whole[len(head) :] if whole.startswith(head) else await self._decode(token_ids, skip, submit.tenant)

    async def _decode(self, token_ids: Sequence[int], skip: bool, tenant: str) -> str:
        decoding = self._tokenizers.decode(token_ids, skip_special_tokens=skip, tenant=tenant)
        text: str = (await decoding).text
        return text


@dataclass(slots=True)
class _Origin:
    """Says what computes the steps of one prompt; empty: no step has ended.

    Attributes:
        numerics: Of the first step. A search that has begun goes on where engines compute so, as any other answer.
        is_mixed: Engines of different numerics have computed steps.
        cpu: What the steps have cost; None where nothing is billed, and once an output says it.
    """

    weights_version: str = ""
    numerics: str = ""
    is_mixed: bool = False
    cpu: types_pb2.CpuTimes | None = None

    def note(self, finished: output_processor_pb2.RequestFinished) -> None:
        """Note what has computed a step. Raises ``Unavailable`` for other weights than before: the scores of beams of
        two versions cannot be compared."""
        version = finished.weights_version
        if version != self.weights_version and self.weights_version:
            raise errors.Unavailable("the weights were replaced during the beam search; retry")
        self.weights_version = version
        self.numerics = self.numerics or finished.numerics
        self.is_mixed |= finished.timeline.mixed_numerics
        if finished.timeline.HasField("cpu"):
            self.cpu, cpu = self.cpu or types_pb2.CpuTimes(), finished.timeline.cpu
            self.cpu.output_processor_ns += cpu.output_processor_ns
            self.cpu.engine_ns += cpu.engine_ns


class BeamRun:
    """Searches the likeliest outputs of all prompts, and returns them together, each as one delta.

    The requests of a step are as many as the outputs that the gateway admitted, and one step follows the other.
    """

    def __init__(
        self,
        submits: Sequence[output_processor_pb2.Submit],
        plan: BeamPlan,
        request_id: str,
        pool: OutputPool,
        texts: BeamTexts,
        *,
        deadline_ns: int,
        clock: Callable[[], int],
        media: RestorableMedia | None = None,
    ) -> None:
        """``deadline_ns``: when the whole request must have ended, by ``clock``, which returns nanoseconds. ``media``:
        the images of the prompt; None: it has none."""
        self._submits, self._media = submits, media
        self._num_candidates = plan.num_candidates
        self._steps = [_one_token(submit, self._num_candidates) for submit in submits]
        self._searches: list[BeamSearch[Row]] = [
            BeamSearch(_settings(submit, plan.length_penalty)) for submit in submits
        ]
        self._request_id = request_id
        self._pool = pool
        self._texts = texts
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._cached_tokens = [0] * len(submits)
        # For each prompt its own: two may have begun on engines of different kinds, and their beams do not meet.
        self._origins = [_Origin() for _ in submits]
        self._cancels: list[Cancel] = []  # of the present step
        self._is_cancelled = False
        self.num_steps = 0
        """Steps that were computed."""
        self.done = False
        """Whether the outputs were taken."""

    async def take(self, outlet: Outlet | None = None) -> list[Delta]:
        """Search, and return all outputs. Raises what ended a step early. ``outlet`` is not used: nothing streams."""
        while any(search.live for search in self._searches):
            await self._step()
        deltas = []
        for number, (submit, search) in enumerate(zip(self._submits, self._searches, strict=True)):
            first = number * (submit.num_samples or 1)
            for index, beam in enumerate(search.best(), first):
                deltas.append(await self._delta(submit, beam, index, number))
        self.done = True
        return deltas

    def cancel(self) -> None:
        """Cancel what still runs."""
        self._is_cancelled = True
        for cancel in self._cancels:
            cancel()

    async def _step(self) -> None:
        """Compute one token after every live beam. Raises ``Unavailable`` if engines abort it again and again."""
        beams = [(number, beam) for number, search in enumerate(self._searches) for beam in search.live]
        found: dict[int, Row] = {}
        # A pause aborts what runs on an engine. A beam's request of one token can be repeated on any engine, with the
        # same result, so the search need not end with it.
        for attempt in range(_ATTEMPTS):
            missing = [index for index in range(len(beams)) if index not in found]
            if missing and not self._is_cancelled:
                found |= await self._compute(beams, missing, attempt)
        if len(found) < len(beams):
            raise errors.Unavailable("an engine aborted a step of the beam search; retry")
        rows = iter([found[index] for index in range(len(beams))])
        for search in self._searches:
            if search.live:
                search.advance([self._candidates(next(rows)) for _ in search.live])
        self.num_steps += 1

    async def _compute(
        self, beams: Sequence[tuple[int, Beam[Row]]], chosen: Sequence[int], attempt: int
    ) -> dict[int, Row]:
        """Return the log probabilities after the ``chosen`` of the beams, each with the number of its prompt, by index;
        without those that an engine aborted."""
        collector = Collector(len(chosen))
        self._cancels = []
        for place, index in enumerate(chosen):
            submit = self._request(*beams[index], f"{index}-{attempt}" if attempt else str(index))
            # Each beam is a request of one token, greedy, for its log probabilities; the prefix cache shares the
            # blocks. Beams inside the engine would need copies on write and a scheduler that knows groups; vLLM
            # removed both.
            self._cancels.append(self._pool.submit(submit, collector, place, self._media))
        found: dict[int, Row] = {}
        while not collector.done:
            for delta in await collector.take():
                if delta.logprobs:
                    found[chosen[delta.index]] = delta.logprobs[0]
                if delta.finished is not None:
                    self._count_cached(chosen[delta.index], delta.finished)
                    number, _ = beams[chosen[delta.index]]
                    self._origins[number].note(delta.finished)
        return found

    def _request(self, number: int, beam: Beam[Row], name: str) -> output_processor_pb2.Submit:
        submit = output_processor_pb2.Submit()
        submit.CopyFrom(self._steps[number])
        submit.prompt.token_ids.extend(beam.token_ids)
        submit.request_id = f"{self._request_id}-{number}-{self.num_steps}-{name}"
        if numerics := self._origins[number].numerics:
            submit.journals.add(numerics=numerics)
        submit.timeout.FromNanoseconds(max(self._deadline_ns - self._clock(), 0))
        return submit

    def _count_cached(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """Keep how much of each prompt was cached when the search began: then there is one request for each."""
        if not self.num_steps:
            self._cached_tokens[index] = finished.cached_tokens

    def _candidates(self, row: Row) -> BeamCandidates[Row]:
        columns = row.logprobs
        return BeamCandidates(columns.token_id[: self._num_candidates], columns.logprob[: self._num_candidates], row)

    async def _delta(self, submit: output_processor_pb2.Submit, beam: Beam[Row], index: int, number: int) -> Delta:
        """Return one output of the prompt with this number. As in vLLM, the token that ended it is left out unless the
        client wants it."""
        token_ids, rows = list(beam.token_ids), beam.rows
        if beam.end_token_id is not None and not submit.text.include_stop_str_in_output:
            token_ids, rows = token_ids[:-1], rows[:-1]
        is_stop, origin = beam.end_token_id is not None, self._origins[number]
        finished = output_processor_pb2.RequestFinished(
            reason=types_pb2.FINISH_REASON_STOP if is_stop else types_pb2.FINISH_REASON_LENGTH,
            stop_reason=str(beam.end_token_id) if is_stop else "",
            prompt_tokens=len(submit.prompt.token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=self._cached_tokens[number],
            attempts=1,
            weights_version=origin.weights_version,
            timeline=types_pb2.Timeline(mixed_numerics=origin.is_mixed, cpu=origin.cpu),
        )
        origin.cpu = None  # all outputs of the prompt together have this cost
        text = await self._texts.text_of(submit, beam.token_ids[:-1] if is_stop else beam.token_ids)
        params = submit.sampling_params
        logprobs = [logprobs_of(token_ids, rows, params.logprobs)] if params.HasField("logprobs") else ()
        return Delta(index, 0, text, token_ids, finished, logprobs)


def _one_token(submit: output_processor_pb2.Submit, num_candidates: int) -> output_processor_pb2.Submit:
    """Return what the requests of a prompt's steps have in common: greedy, because only log probabilities count."""
    params = submit.sampling_params
    return output_processor_pb2.Submit(
        prompt=submit.prompt,
        block_hash_prefixes=submit.block_hash_prefixes,
        sampling_params=types_pb2.SamplingParams(
            max_tokens=1,
            temperature=0,
            logprobs=max(num_candidates, params.logprobs),
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        ),
        tenant=submit.tenant,
        priority=submit.priority,
        data_parallel_rank=submit.data_parallel_rank if submit.HasField("data_parallel_rank") else None,
        trace_headers=submit.trace_headers,
        preferred_engine=submit.preferred_engine,
    )


def _settings(submit: output_processor_pb2.Submit, length_penalty: float) -> BeamSettings:
    params = submit.sampling_params
    return BeamSettings(
        width=submit.num_samples or 1,
        max_tokens=params.max_tokens,
        prompt_len=len(submit.prompt.token_ids),
        end_token_ids=frozenset(params.stop_token_ids),
        length_penalty=length_penalty,
    )


def logprobs_of(
    token_ids: Sequence[int], rows: Sequence[output_processor_pb2.SlotTextLogprobs], num_best: int
) -> output_processor_pb2.SlotTextLogprobs:
    """Return the log probabilities of a sequence, with at most ``num_best`` alternatives for each token.

    ``rows``: what was computed at each position, for the token that is the likeliest there.
    """
    joined = output_processor_pb2.SlotTextLogprobs()
    columns = joined.logprobs
    for token_id, row in zip(token_ids, rows, strict=True):
        place = list(row.logprobs.token_id).index(token_id)
        columns.top = min(num_best, row.logprobs.top)
        columns.sampled.append(row.logprobs.logprob[place])
        columns.rank.append(place + 1)
        columns.token_id.extend(row.logprobs.token_id[: columns.top])
        columns.logprob.extend(row.logprobs.logprob[: columns.top])
        joined.sampled_text.append(row.token_text[place])
        joined.token_text.extend(row.token_text[: columns.top])
    return joined
