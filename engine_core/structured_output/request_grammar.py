"""One request's way through its grammar, and what that leaves its next token to be."""

from collections.abc import Iterable, Sequence

from .grammar_backend import Bitmask, Grammar, GrammarError, bitmask_of


class GrammarEnd(Exception):
    """The text is complete, and no token may say so: the request has ended."""


class RequestGrammar:
    """Follows the output lazily: the tokens that came since are accepted when the next bitmask is asked for."""

    __slots__ = ("_eos", "_grammar", "_min_tokens", "_stop", "num_accepted")

    def __init__(self, grammar: Grammar, eos: Bitmask, stop_token_ids: Iterable[int], min_tokens: int) -> None:
        """``eos``: the tokens that stand for the end in the grammar's bitmasks, itself as a bitmask."""
        self._grammar = grammar
        self._eos = eos
        self._stop = bitmask_of(stop_token_ids, len(eos))
        self._min_tokens = min_tokens
        self.num_accepted = 0
        """Output tokens that the grammar has seen."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Goes on by output tokens, replayed or new. Raises ``GrammarError``."""
        if token_ids:
            self._grammar.accept_tokens(token_ids)
            self.num_accepted += len(token_ids)

    def fill(self, row: Bitmask) -> None:
        """Writes into ``row``, [words], what the token after those accepted may be: what the grammar allows and, where
        the text may end, the request's stop tokens.

        Raises ``GrammarEnd``, ``GrammarError``.
        """
        self._grammar.fill_bitmask(row)
        may_end = bool((row & self._eos).any())
        may_stop = self.num_accepted >= self._min_tokens
        row &= ~self._eos
        if not may_stop:
            row &= ~self._stop
        if not row.any():
            self._end(row, may_end=may_end, may_stop=may_stop)
        elif may_end and may_stop:
            row |= self._stop & self._eos

    def _end(self, row: Bitmask, *, may_end: bool, may_stop: bool) -> None:
        """Nothing can follow but one of the stop tokens, if there is any."""
        if not may_end:
            raise GrammarError("no token of the model can follow")
        if not may_stop or not self._stop.any():
            raise GrammarEnd
        row |= self._stop
