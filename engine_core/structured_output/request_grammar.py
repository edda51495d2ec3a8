"""Follows one request's output through its grammar, and computes which tokens may come next."""

from collections.abc import Iterable, Sequence

from .grammar_backend import Bitmask, Grammar, GrammarError, bitmask_of


class GrammarEnd(Exception):
    """The text is complete, and the request has no stop token to end with: it ends without one."""


class RequestGrammar:
    """Follows the output lazily: new tokens are accepted when the next bitmask is needed."""

    __slots__ = ("_eos", "_grammar", "_min_tokens", "_stop")

    def __init__(self, grammar: Grammar, eos: Bitmask, stop_token_ids: Iterable[int], min_tokens: int) -> None:
        """``eos`` is a bitmask of the tokens that mean the end of the text in the grammar's bitmasks."""
        self._grammar = grammar
        self._eos = eos
        self._stop = bitmask_of(stop_token_ids, len(eos))
        self._min_tokens = min_tokens

    def accept(self, token_ids: Sequence[int]) -> None:
        """Follow output tokens, replayed or new. Raises ``GrammarError`` for one that the grammar does not allow."""
        if token_ids:
            self._grammar.accept_tokens(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come next, without following them."""
        return self._grammar.validate_tokens(token_ids) if token_ids else 0

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens. Raises ``GrammarError`` if the library cannot."""
        self._grammar.rollback(num_tokens)

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends the output."""
        return bool((self._eos | self._stop)[token_id // 32] >> (token_id % 32) & 1)

    def fill_after(self, token_ids: Sequence[int], row: Bitmask) -> None:
        """As :meth:`fill`, after these first tokens of an output, which are not accepted.

        Raises ``GrammarError`` if the grammar does not allow them.
        """
        if self._grammar.validate_tokens(token_ids) != len(token_ids):
            raise GrammarError("a token does not follow the grammar")
        self.accept(token_ids)
        try:
            self.fill(row, len(token_ids))
        finally:
            if token_ids:
                self._grammar.reset()

    def fill(self, row: Bitmask, num_output_tokens: int) -> None:
        """Write to ``row`` [words] which tokens may come next: those that the grammar allows and, where the text may
        end, the request's stop tokens. ``num_output_tokens``: of the output so far, reasoning included.

        Raises ``GrammarEnd`` if the request ends here, ``GrammarError`` if no token can follow.
        """
        self._grammar.fill_bitmask(row)
        # The backend marks the end with its own end tokens. A request may have others, none at all (ignore_eos), or may
        # not end yet (min_tokens), so the bits are taken out and put back by the request's own rules.
        may_end = bool((row & self._eos).any())
        may_stop = num_output_tokens >= self._min_tokens
        row &= ~self._eos
        if not may_stop:
            row &= ~self._stop
        if not row.any():
            self._end(row, may_end=may_end, may_stop=may_stop)
        elif may_end and may_stop:
            row |= self._stop & self._eos

    def _end(self, row: Bitmask, *, may_end: bool, may_stop: bool) -> None:
        """Allow only the stop tokens. Raises if the text may not end here, or has no stop token to end with."""
        if not may_end:
            raise GrammarError("no token of the model can follow")
        # vLLM goes on without a grammar here; the text would no longer obey it.
        if not may_stop or not self._stop.any():
            raise GrammarEnd
        row |= self._stop
