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

from .offline_loop import Progress
from .offline_request import OfflineRequest
from .outputs import Logprob
from .prompts import TokenizedPrompt
from .request_builder import RequestBuilder
from .sampling_params import SamplingParams

Positions: TypeAlias = dict[int, Logprob]
Run: TypeAlias = Callable[[list[OfflineRequest]], object]
"""Runs requests to their ends."""


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

        Raises ``ValueError`` or ``InvalidArgument``.
        """
        at_once = max(len(prompts), 1) if concurrency_limit is None else concurrency_limit
        if at_once < 1:
            raise ValueError(f"concurrency_limit must be at least 1, not {concurrency_limit}")
        self._builder.build(prompts, self._sampling(params, params.max_tokens))  # checks all before any runs
        outputs: list[BeamSearchOutput] = []
        with Progress(len(prompts), use_tqdm) as progress:
            for start in range(0, len(prompts), at_once):
                for prompt, beams in self._search_some(prompts[start : start + at_once], params):
                    outputs.append(BeamSearchOutput([self._sequence(prompt, beam) for beam in beams]))
                    progress.finished(len(prompt.token_ids), sum(len(beam.token_ids) for beam in beams))
        return outputs

    def _search_some(
        self, prompts: Sequence[TokenizedPrompt], params: BeamSearchParams
    ) -> list[tuple[TokenizedPrompt, list[Beam[Positions]]]]:
        """Search prompts together: each step runs one request for every live beam of all."""
        ends = frozenset(() if params.ignore_eos else self._builder.eos_token_ids)
        searches: list[tuple[TokenizedPrompt, BeamSearch[Positions]]] = []
        for prompt in prompts:
            settings = BeamSettings(
                params.beam_width, params.max_tokens, len(prompt.token_ids), ends, params.length_penalty
            )
            searches.append((prompt, BeamSearch(settings)))
        one_token = self._sampling(params, max_tokens=1)
        while any(search.live for _, search in searches):
            steps = [
                (search, self._builder.build([prompt.then(beam.token_ids) for beam in search.live], one_token))
                for prompt, search in searches
                if search.live
            ]
            # All prompts advance together: the requests of one step share a batch, where one search after the other
            # would fill a fraction of it.
            self._run([request for _, step in steps for request in step])
            for search, step in steps:
                search.advance([_candidates(request) for request in step])
        return [(prompt, search.best()) for prompt, search in searches]

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


def _candidates(request: OfflineRequest) -> BeamCandidates[Positions]:
    (completion,) = request.output.outputs
    assert completion.logprobs
    row = completion.logprobs[0]
    return BeamCandidates(list(row), [each.logprob for each in row.values()], row)
