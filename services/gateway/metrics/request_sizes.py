"""Measures the sizes of requests under vLLM's names, once for each, at its end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry import process_metrics

_SAMPLES = (1, 2, 5, 10, 20)


class Sized(Protocol):
    """Describes what is read of a generation at its end."""

    num_samples: int
    prompts: list[Sequence[int]]
    completion_tokens: list[int]

    @property
    def finished(self) -> Mapping[int, object]:
        """The outputs that have ended, by index."""

    def max_tokens_of(self, index: int) -> int:
        """Return the limit of an output's tokens."""


class RequestSizes:
    """Holds the histograms. As in vLLM, a request here is one prompt; each of its samples has an output of its own."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._prompt, self._generation, self._limit, self._longest = (
            process_metrics.histogram(registry, name, text, labels, process_metrics.TOKENS)
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of each output that has ended."),
                ("request_generation_tokens", "Tokens of each output that has ended."),
                ("request_params_max_tokens", "Limit of the tokens of each output that has ended."),
                ("request_max_num_generation_tokens", "Tokens of the longest output of each prompt that has ended."),
            )
        )
        text = "Samples of each prompt that has ended."
        self._samples = process_metrics.histogram(registry, "request_params_n", text, labels, _SAMPLES)

    def observe(self, generation: Sized) -> None:
        """Observe the outputs that have ended, and the prompts whose outputs all have ended."""
        num_samples = generation.num_samples
        for index in generation.finished:
            self._prompt.observe(len(generation.prompts[index // num_samples]))
            self._generation.observe(generation.completion_tokens[index])
            self._limit.observe(generation.max_tokens_of(index))
        for first in range(0, len(generation.completion_tokens), num_samples):
            samples = range(first, first + num_samples)
            if all(index in generation.finished for index in samples):
                self._longest.observe(max(generation.completion_tokens[index] for index in samples))
                self._samples.observe(num_samples)
