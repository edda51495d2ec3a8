"""Counts the reasoning tokens of a request's outputs."""

from collections.abc import Sequence

from tokenloom.request.reasoning import Reasoning, ReasoningMarks


class OutputsReasoning:
    """Follows the reasoning of each output by its tokens.

    Attributes:
        is_open, is_over: Whether the first prompt leaves the reasoning open, or has closed it.
    """

    def __init__(self, marks: ReasoningMarks, prompts: Sequence[Sequence[int]], num_samples: int) -> None:
        """The first ``num_samples`` outputs continue the first prompt, and so on."""
        of_prompts = [Reasoning(marks, prompt) for prompt in prompts]
        self.is_open, self.is_over = of_prompts[0].is_inside, of_prompts[0].is_over
        self._of_outputs = [each.copy() for each in of_prompts for _ in range(num_samples)]

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        """Follow new tokens of an output."""
        self._of_outputs[index].feed(token_ids)

    def num_tokens(self, index: int) -> int:
        """Return the reasoning tokens of an output so far."""
        return self._of_outputs[index].num_tokens

    @property
    def total(self) -> int:
        """The reasoning tokens of all outputs so far."""
        return sum(each.num_tokens for each in self._of_outputs)
