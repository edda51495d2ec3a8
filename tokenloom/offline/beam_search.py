"""Beam search of the offline API: its parameters and results, with vLLM's names, and how it drives the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct
from tokenizers import Tokenizer

from tokenloom.request import validation
from tokenloom.request.beam_search import (
    MAX_LENGTH_PENALTY,
    Beam,
    BeamCandidates,
    BeamSearch,
    BeamSettings,
    num_candidates,
)
from tokenloom.request.sampling_params import MAX_SAMPLES

from .offline_loop import Progress, check_failures
from .offline_request import OfflineRequest
from .outputs import Logprob
from .prompts import TokenizedPrompt
from .request_builder import RequestBuilder
from .sampling_params import SamplingParams

Positions: TypeAlias = dict[int, Logprob]
Run: TypeAlias = Callable[[list[OfflineRequest]], object]
"""Runs requests to their ends; one that fails has its error."""


class BeamSearchParams(Struct, kw_only=True):
    """How to search. A wrong value raises ``ValueError`` that names it."""

    beam_width: Annotated[int, Meta(description="Beams that continue after each token, and sequences to return.")]
    max_tokens: Annotated[int, Meta(description="Tokens of the longest sequence.")]
    ignore_eos: Annotated[bool, Meta(description="Continue after an end-of-sequence token.")] = False
    temperature: Annotated[
        float, Meta(description="Has no effect: log probabilities are the model's own, as in vLLM.")
    ] = 0.0
    length_penalty: Annotated[
        float, Meta(description="Exponent of the length by which scores are divided, -10 to 10.")
    ] = 1.0
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Has no effect here, as in vLLM: sequences hold the token that ended them.")
    ] = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_SAMPLES), ("max_tokens", 2**32 - 1)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most}, not {value!r}")
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty must be from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}")
        if type(self.temperature) not in (int, float) or not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature!r}")


@dataclass
class BeamSearchSequence:
    """One sequence that a beam search found."""

    tokens: list[int]
    """The prompt and the output, including the token that ended it."""
    logprobs: list[Positions]
    """For each output token a dict by token id: the tokens that the search considered there."""
    cum_logprob: float
    """Sum over the output tokens."""
    text: str | None = None
    """The text of all ``tokens``."""
    finish_reason: str | None = None
    """``stop`` after an end-of-sequence token, otherwise ``length``."""
    stop_reason: int | str | None = None
    """The end-of-sequence token."""


@dataclass
class BeamSearchOutput:
    """What a beam search found for one prompt."""

    sequences: list[BeamSearchSequence]
    """``beam_width`` sequences, best first."""
    error: str | None = None
    """Why the search of this prompt, one of several, was refused or failed; then there are no sequences."""


class OfflineBeamSearch:
    """Searches the continuations of prompts with one engine."""

    def __init__(self, builder: RequestBuilder, tokenizer: Tokenizer, run: Run) -> None:
        self._builder = builder
        self._tokenizer = tokenizer
        self._run = run

    def search(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: BeamSearchParams,
        concurrency_limit: int | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[BeamSearchOutput]:
        """Return what is found for each prompt. ``concurrency_limit``: prompts that are searched at once; None: all.

        Raises ``ValueError`` or ``InvalidArgument``, and the error of the first search if all fail.
        """
        at_once = max(len(prompts), 1) if concurrency_limit is None else concurrency_limit
        if at_once < 1:
            raise ValueError(f"concurrency_limit must be at least 1, not {concurrency_limit}")
        checked = self._builder.build(prompts, self._sampling(params, params.max_tokens), refuses_alone=True)
        searches = [
            _Search(prompt, self._begin(prompt, params), request.error)
            for prompt, request in zip(prompts, checked, strict=True)
        ]
        one_token = self._sampling(params, max_tokens=1)
        with Progress(len(prompts), use_tqdm) as progress:
            for start in range(0, len(prompts), at_once):
                some = searches[start : start + at_once]
                self._search_some(some, one_token)
                for each in some:
                    progress.finished(len(each.prompt.token_ids), sum(len(beam.token_ids) for beam in each.best()))
        check_failures([each.error for each in searches])
        return [self._output(each) for each in searches]

    def _begin(self, prompt: TokenizedPrompt, params: BeamSearchParams) -> BeamSearch[Positions]:
        ends = frozenset(() if params.ignore_eos else self._builder.eos_token_ids)
        num_tokens = len(prompt.token_ids)
        return BeamSearch(BeamSettings(params.beam_width, params.max_tokens, num_tokens, ends, params.length_penalty))

    def _search_some(self, searches: Sequence["_Search"], one_token: SamplingParams) -> None:
        """Search prompts together: each step runs one request for every live beam of all."""
        while live := [each for each in searches if each.is_live]:
            steps = [self._builder.build(each.continued(), one_token) for each in live]
            # All prompts advance together: the requests of one step share a batch, where one search after the other
            # would fill a fraction of it.
            self._run([request for step in steps for request in step])
            for each, step in zip(live, steps, strict=True):
                each.error = next((request.error for request in step if request.error is not None), None)
                if each.error is None:
                    each.beams.advance([_candidates(request) for request in step])

    def _sampling(self, params: BeamSearchParams, max_tokens: int) -> SamplingParams:
        """Return how a step is sampled: greedily, because only its log probabilities count."""
        limits = self._builder.limits
        top = num_candidates(
            params.beam_width,
            vocab_size=limits.vocab_size,
            max_logprobs=validation.max_logprobs(limits),
            field="beam_width",
        )
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=top, ignore_eos=True, seed=0)

    def _output(self, search: "_Search") -> BeamSearchOutput:
        error = None if search.error is None else str(search.error)
        return BeamSearchOutput([self._sequence(search.prompt, beam) for beam in search.best()], error)

    def _sequence(self, prompt: TokenizedPrompt, beam: Beam[Positions]) -> BeamSearchSequence:
        tokens = [*prompt.token_ids, *beam.token_ids]
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=list(beam.rows),
            cum_logprob=beam.cumulative_logprob,
            text=self._tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason="length" if beam.end_token_id is None else "stop",
            stop_reason=beam.end_token_id,
        )


@dataclass
class _Search:
    """Searches one prompt, until it ends or fails."""

    prompt: TokenizedPrompt
    beams: BeamSearch[Positions]
    error: Exception | None

    @property
    def is_live(self) -> bool:
        return self.error is None and bool(self.beams.live)

    def continued(self) -> list[TokenizedPrompt]:
        """Return the prompt followed by the tokens of each live beam."""
        return [self.prompt.then(beam.token_ids) for beam in self.beams.live]

    def best(self) -> list[Beam[Positions]]:
        """Return the beams that were found, best first."""
        return self.beams.best() if self.error is None else []


def _candidates(request: OfflineRequest) -> BeamCandidates[Positions]:
    (completion,) = request.output.outputs
    assert completion.logprobs
    row = completion.logprobs[0]
    return BeamCandidates(list(row), [each.logprob for each in row.values()], row)
