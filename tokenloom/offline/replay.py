"""Computes recorded requests again in this process, and compares what comes with what was recorded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from random import Random
from typing import Any, Final, get_args

from tokenloom.engine_core.data.config import Dtype
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.request.errors import TokenloomError
from tokenloom.request.request_records import (
    TOKENWISE,
    RecordedLogprobs,
    RecordedOutput,
    RecordedRequest,
    from_floats,
    repeats_exactly,
)
from tokenloom.services.engine.records.core_request import to_core_request
from tokenloom.services.output_processor.request.sample_output import detokenizer_of
from tokenloom.services.output_processor.request.verification import (
    compared_outputs,
    is_cut_short,
    limit_tokens,
    params_of_output,
    params_of_sample,
    request_of,
)
from tokenloom.services.output_processor.text.detokenizer import OutputText
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.engine_pb2 import AddRequest
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import SamplingParams

from .engine_args import EngineArgs
from .llm_engine import LLMEngine
from .offline_request import OfflineRequest, OfflineSample, TextSettings, token_logprobs
from .outputs import CompletionOutput, Logprob

TOLERANCE: Final = 1e-4
"""Of log probabilities, unless both engines are batch-invariant and computed in the same way: then the bits count."""
SHOWN: Final = 5
"""Likeliest tokens that are shown where outputs differ."""
_QUANTIZATIONS = ("int8-dynamic", "int4", "fp8")

Position = Mapping[int, Logprob]
"""Log probabilities at one place by token, the token itself first."""


@dataclass(frozen=True)
class OutputDifference:
    """The first thing in which an output differs.

    Attributes:
        index: Number of the output.
        what: For example ``token 17``.
        recorded, replayed: What was there, in words.
        token: Position of the token, if tokens differ; None: something else does.
        recorded_top: Log probabilities at that position; None: they were not asked for.
        replayed_top: The same of the replay; None: no tokens differ.
    """

    index: int
    what: str
    recorded: str
    replayed: str
    token: int | None = None
    recorded_top: Position | None = None
    replayed_top: Position | None = None


@dataclass
class Replayed:
    """What has become of one record.

    Attributes:
        notes: What explains a difference: other versions, weights or numerics.
        refusal: Why it cannot be computed again; empty: it was.
        differences: Of the outputs that differ, the first one each.
        num_tokens: Tokens of the outputs that were compared.
    """

    record: RecordedRequest
    notes: list[str]
    refusal: str = ""
    differences: list[OutputDifference] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether everything came again."""
        return not self.refusal and not self.differences

    @property
    def may_follow_threads(self) -> bool:
        """Whether the same engine with another number of threads may draw other tokens."""
        return _may_follow_threads(options_of(self.record))


def _may_follow_threads(options: Mapping[str, Any]) -> bool:
    return options.get("dtype") in ("bfloat16", "float16") and not options.get("batch_invariant", False)


def options_of(record: RecordedRequest) -> dict[str, Any]:
    """Return the options of an engine that its recorded numerics name, as keywords of ``LLM``, and the number of
    threads if tokens may follow it: two engines on two cores have one each, and a replay there would have two."""
    parts = record.outputs[0].numerics.split("/") if record.outputs else []
    options: dict[str, Any] = {}
    for name, values in (("dtype", get_args(Dtype)), ("quantization", _QUANTIZATIONS)):
        if found := [part for part in parts if part in values]:
            options[name] = found[0]
    if TOKENWISE in parts:
        options["batch_invariant"] = True
    if record.num_threads and _may_follow_threads(options):
        options["num_threads"] = record.num_threads
    return options


class Replayer:
    """Computes records again with one model."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Load the model. ``options``: keywords of ``LLM``. Raises ``ValueError`` as ``LLM``."""
        self._engine = LLMEngine(EngineArgs(model, max_logprobs=-1, **options).by_default(disable_log_stats=True))
        self._vocabulary = Vocabulary(self._engine.tokenizer)
        self._fingerprint = self._engine.fingerprint()
        self._num_threads = self._engine.client.ready.num_threads
        self._release = version("tokenloom")

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def replay(self, records: Sequence[RecordedRequest]) -> list[Replayed]:
        """Compute records again, all at once; return what has become of each."""
        results = [Replayed(record, self.explain(record)) for record in records]
        running: list[tuple[Replayed, OfflineRequest]] = []
        for number, result in enumerate(results):
            try:
                running.append((result, self._request(result.record, number)))
            except (TokenloomError, ValueError) as error:
                result.refusal = error.message if isinstance(error, TokenloomError) else str(error)
        self._engine.loop.run([request for _, request in running], False)
        for result, request in running:
            if request.error is not None:
                result.refusal = str(request.error)
            else:
                self._compare(result, request)
        ours = self._fingerprint
        if len(running) > 1 and not repeats_exactly(ours.numerics, ours.kv_layout):
            self._compare_alone(result for result in results if result.differences)
        for result in results:
            result.differences = [self._with_top(result.record, each) for each in result.differences]
        return results

    def explain(self, record: RecordedRequest) -> list[str]:
        """Return what sets this process apart from the engines that computed a record."""
        ours, release = self._fingerprint, self._release
        notes = [f"release: recorded by {record.release}, this is {release}"] * (record.release != release)
        if record.tokenizer != ours.tokenizer.hex():
            notes.append("tokenizer: its files differ from those of the record")
        for weights in sorted({each for output in record.outputs for each in output.weights}):
            if weights != ours.weights.hex():
                notes.append(f"weights: recorded {weights[:16]}, here {ours.weights.hex()[:16]}")
        legs = [leg for output in record.outputs for leg in output.legs]
        for name, here, parts in (
            ("numerics", ours.numerics, (*legs, *record.outputs)),
            ("kv_layout", ours.kv_layout, legs),
        ):
            recorded = {getattr(part, name) for part in parts} - {"", here}
            notes += [_unlike(name, each, here) for each in sorted(recorded)]
        if record.num_threads not in (0, self._num_threads) and _may_follow_threads(options_of(record)):
            notes.append(f"threads: recorded {record.num_threads}, here {self._num_threads}")
        if any(output.is_mixed for output in record.outputs):
            notes.append("numerics: engines that compute in different ways have computed this request")
        return notes

    def _request(self, record: RecordedRequest, number: int) -> OfflineRequest:
        """Return a request that computes a record again. Raises ``ValueError`` and ``InvalidArgument`` that say why it
        cannot be."""
        submit = request_of(record)
        samples = [
            self._sample(submit, params_of_output(submit, record, output), output.index, number)
            for output in compared_outputs(record)
        ]
        return OfflineRequest(record.id, None, samples)

    def _sample(self, submit: Submit, params: SamplingParams, index: int, number: int) -> OfflineSample:
        add = AddRequest(prompt=submit.prompt, sampling_params=params)
        core = to_core_request(add, f"{number}.{index}", self._engine.builder.limits, Random(0))
        detokenizer = detokenizer_of(submit, self._vocabulary)
        text = OutputText(detokenizer, frozenset(params.stop_token_ids), self._engine.info.eos_token_ids)
        return OfflineSample(core, index, TextSettings(text, self._vocabulary))

    def _compare_alone(self, results: Iterable[Replayed]) -> None:
        """Compute records once more, each by itself: a difference may come from what is in the batch with it."""
        for result in results:
            request = self._request(result.record, 0)
            self._engine.loop.run([request], False)
            if request.error is None:
                result.differences, result.num_tokens = [], 0
                self._compare(result, request)

    def _compare(self, result: Replayed, request: OfflineRequest) -> None:
        record, prompt_logprobs = result.record, request.output.prompt_logprobs
        numerics = self._fingerprint.numerics
        for output, sample in zip(compared_outputs(record), request.samples, strict=True):
            is_exact = TOKENWISE in numerics.split("/") and output.numerics == numerics and not output.is_mixed
            comparison = RecordComparison(record, output, 0.0 if is_exact else TOLERANCE)
            result.num_tokens += len(output.token_ids)
            if (found := comparison.difference(sample.completion, prompt_logprobs)) is not None:
                result.differences.append(found)

    def _with_top(self, record: RecordedRequest, difference: OutputDifference) -> OutputDifference:
        """Return a difference with the likeliest tokens of the replay: up to there, both have the same tokens."""
        if difference.token is None:
            return difference
        submit = request_of(record)
        params = params_of_sample(submit, difference.index)
        params.logprobs = max(params.logprobs, SHOWN)
        limit_tokens(params, difference.token + 1)
        sample = self._sample(submit, params, difference.index, 0)
        self._engine.loop.run([OfflineRequest(record.id, None, [sample])], False)
        found = sample.completion.logprobs or []
        return replace(difference, replayed_top=found[difference.token] if difference.token < len(found) else None)


class RecordComparison:
    """Compares one output with its record."""

    def __init__(self, record: RecordedRequest, output: RecordedOutput, tolerance: float) -> None:
        """``tolerance``: of log probabilities; 0: they are the same numbers."""
        self._record = record
        self._output = output
        self._tolerance = tolerance
        self._num_also = len(record.sampling_params.get("logprob_token_ids") or ())

    def difference(
        self, completion: CompletionOutput, prompt_logprobs: Sequence[Position | None] | None
    ) -> OutputDifference | None:
        """Return the first difference; None: there is none. ``prompt_logprobs``: at each position of the prompt."""
        return (
            self._of_tokens(completion) or self._of_ends(completion) or self._of_logprobs(completion, prompt_logprobs)
        )

    def _of_tokens(self, completion: CompletionOutput) -> OutputDifference | None:
        theirs, ours = self._output.token_ids, completion.token_ids
        for place in range(max(len(theirs), len(ours))):
            pair = theirs[place : place + 1], ours[place : place + 1]
            if pair[0] != pair[1]:
                recorded, replayed = (str(each[0]) if each else "nothing: the output had ended" for each in pair)
                top = dict(self._positions(self._output.logprobs, theirs)).get(place)
                return OutputDifference(self._output.index, f"token {place}", recorded, replayed, place, top)
        return None

    def _of_ends(self, completion: CompletionOutput) -> OutputDifference | None:
        output = self._output
        if is_cut_short(self._record, output):
            return None
        stop_reason = "" if completion.stop_reason is None else str(completion.stop_reason)
        for what, recorded, replayed in (
            ("reason of the end", output.finish_reason, completion.finish_reason),
            ("stop reason", output.stop_reason, stop_reason),
            ("text", output.text, completion.text if output.text is not None else None),
        ):
            if recorded != replayed:
                return OutputDifference(output.index, what, repr(recorded), repr(replayed))
        return None

    def _of_logprobs(
        self, completion: CompletionOutput, prompt_logprobs: Sequence[Position | None] | None
    ) -> OutputDifference | None:
        output = self._output
        for where, recorded, token_ids, replayed in (
            ("the prompt's token", output.prompt_logprobs, self._record.prompt, prompt_logprobs or ()),
            ("token", output.logprobs, output.token_ids, completion.logprobs or ()),
        ):
            for place, theirs in self._positions(recorded, token_ids):
                ours = replayed[place] if place < len(replayed) else None
                if self._are_unlike(theirs, ours):
                    what = f"log probabilities of {where} {place}"
                    return OutputDifference(output.index, what, _in_words(theirs), _in_words(ours))
        return None

    def _positions(
        self, recorded: Sequence[RecordedLogprobs], token_ids: Sequence[int]
    ) -> Iterator[tuple[int, Position]]:
        """Yield the places that have recorded log probabilities, with these."""
        for part in recorded:
            columns = Logprobs(
                from_floats(part.sampled), part.ranks, part.top, part.token_ids, from_floats(part.logprobs)
            )
            own = token_ids[part.start : part.start + len(part.ranks)]
            yield from enumerate(token_logprobs(columns, own, self._num_also, None), part.start)

    def _are_unlike(self, theirs: Position, ours: Position | None) -> bool:
        if ours is None or next(iter(theirs)) not in ours:
            return True
        # The last of the alternatives may be others where numbers are nearly equal.
        if not self._tolerance and theirs.keys() != ours.keys():
            return True
        pairs = [(theirs[token].logprob, ours[token].logprob) for token in theirs.keys() & ours.keys()]
        return any(one != other and not abs(one - other) <= self._tolerance for one, other in pairs)


def _unlike(name: str, recorded: str, ours: str) -> str:
    """Return a sentence about two names that differ, and about the parts that only one of them has."""
    theirs, here = recorded.split("/"), ours.split("/")
    only = [part for part in theirs if part not in here], [part for part in here if part not in theirs]
    told = " and ".join(
        f"only {where} has {', '.join(parts)}"
        for where, parts in zip(("the record", "this process"), only, strict=True)
        if parts
    )
    return f"{name}: recorded {recorded}, here {ours}" + (f": {told}" if told else "")


def _in_words(position: Position | None) -> str:
    return "none" if position is None else in_words(position)


def in_words(position: Position) -> str:
    """Return log probabilities at a place as text, the likeliest token first."""
    best = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ", ".join(
        f"{token} {each.logprob:.6f}" + (f" {each.decoded_token!r}" if each.decoded_token is not None else "")
        for token, each in best
    )
