"""Follows one output: its reasoning, within a budget, then its answer through a grammar."""

from collections.abc import Sequence

from tokenloom.request.reasoning import Reasoning

from .grammar_backend import Bitmask, GrammarError, bitmask_of
from .request_grammar import RequestGrammar


class RequestConstraint:
    """Says which tokens may come next. Everything follows from the prompt and the tokens of the output.

    Attributes:
        num_seen: Output tokens that it has followed.
        forced: After :meth:`fill`, the only token that may come next whatever the sampling parameters forbid, which is
            one of the reasoning's end mark; None if the reasoning is within its budget or over.
    """

    __slots__ = ("_budget", "_grammar", "_reasoning", "forced", "num_seen")

    def __init__(
        self, grammar: RequestGrammar | None, reasoning: Reasoning | None = None, budget: int | None = None
    ) -> None:
        """Without ``reasoning`` the whole output follows the grammar. ``budget``: the reasoning tokens after which the
        end mark is forced; None: no limit."""
        self._grammar = grammar
        self._reasoning = reasoning
        self._budget = budget
        self.num_seen = 0
        self.forced: int | None = None

    def may_bind(self, num_unseen: int) -> bool:
        """Return whether the token after ``num_unseen`` tokens that it has not followed may be bound."""
        if self._grammar is not None:
            return True
        if not self._is_in_budget:
            return False
        assert self._reasoning is not None
        # What looks like a start mark may turn out to be reasoning.
        return self._num_left <= num_unseen + len(self._reasoning.undecided_token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Follow output tokens, replayed or new. Raises ``GrammarError`` for one that the grammar does not allow."""
        answer = token_ids if self._reasoning is None else self._reasoning.feed(token_ids)
        self.num_seen += len(token_ids)
        if self._grammar is not None and answer:
            self._grammar.accept(answer)

    def fill(self, row: Bitmask) -> bool:
        """Write to ``row`` [words] which tokens may come next. Returns False, and writes nothing, if all may.

        Raises ``GrammarEnd`` if the request ends here, ``GrammarError`` if no token can follow.
        """
        self.forced = None
        if self._is_in_budget and not self._num_left:
            assert self._reasoning is not None
            self.forced = self._reasoning.next_of_end
            row[:] = bitmask_of((self.forced,), len(row))
            return True
        if self._grammar is None or (self._reasoning is not None and self._reasoning.is_inside):
            return False
        if self._reasoning is None or self._reasoning.is_over:
            self._grammar.fill(row, self.num_seen)
        else:
            self._fill_undecided(row, self._grammar, self._reasoning)
        return True

    @property
    def _is_in_budget(self) -> bool:
        """Whether the next token may be one of a limited reasoning."""
        return self._budget is not None and self._reasoning is not None and not self._reasoning.is_over

    @property
    def _num_left(self) -> int:
        assert self._reasoning is not None
        assert self._budget is not None
        # While it is open whether the model reasons, its start mark is free.
        is_open = self._reasoning.is_inside
        return max(self._budget - self._reasoning.num_tokens, 0) if is_open else max(self._budget, 1)

    def _fill_undecided(self, row: Bitmask, grammar: RequestGrammar, reasoning: Reasoning) -> None:
        """Allow what the grammar does, and the next token of the start mark."""
        row[:] = 0
        try:
            grammar.fill_after(reasoning.undecided_token_ids, row)
        except GrammarError:
            if not reasoning.undecided_token_ids:
                raise
            row[:] = 0  # the tokens so far can only be a start mark
        row |= bitmask_of((reasoning.next_of_start,), len(row))
