"""Follows one output: its reasoning, within a budget, then its answer through a grammar, and computes which tokens may
come next."""

from collections.abc import Iterable, Sequence

from tokenloom.request.reasoning import Reasoning

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
        # Nothing but prompt and tokens decides the state, so a preempted, resumed or migrated request needs no case of
        # its own: it is followed from its first token.
        answer = token_ids if self._reasoning is None else self._reasoning.feed(token_ids)
        self.num_seen += len(token_ids)
        if self._grammar is not None and answer:
            self._grammar.accept(answer)

    def num_allowed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of the drafts that follow ``token_ids``, which it has not followed, the grammar allows."""
        if self._grammar is None:
            return len(drafts)
        answer: Sequence[int] = [*token_ids, *drafts]
        if self._reasoning is not None:
            # A copy: these drafts are only asked about, and the state of the reasoning cannot be rolled back as a
            # grammar's.
            answer = self._reasoning.copy().feed(answer)
        return max(0, len(drafts) - len(answer) + self._grammar.num_allowed(answer))

    def fill_rows(self, rows: Bitmask, drafts: Sequence[int]) -> int:
        """Write to ``rows`` [1 + drafts, words] which tokens may come next, and which after each draft.

        Returns how many rows it wrote; 0 if any token may come at each position. With fewer than ``1 + drafts``, the
        last tokens are left to the next step. Raises as :meth:`fill` does for the first row, and ``GrammarError`` if
        the library cannot continue after a draft that exceeds its limits.
        """
        is_bound = self.fill(rows[0])
        if not drafts:
            return int(is_bound)
        # All bits set: a position that nothing binds samples any token.
        rows[int(is_bound) : 1 + len(drafts)] = -1
        forced, num_seen, reasoning = self.forced, self.num_seen, self._reasoning
        self._reasoning = None if reasoning is None else reasoning.copy()
        num_rows, followed = 1, list[int]()
        try:
            # A mask is needed after each draft, before it is known which drafts are right. The end of a text and forced
            # tokens are decided for the first token of a step only, as without drafts, so rows stop there.
            for draft in drafts:
                if not self._follow(draft, followed):
                    break
                is_bound |= self.fill(rows[num_rows])
                if self.forced is not None:
                    break
                num_rows += 1
        except (GrammarEnd, GrammarError):
            pass  # if the draft is right, the next step meets this again, and ends the request
        finally:
            self.forced, self.num_seen, self._reasoning = forced, num_seen, reasoning
            if self._grammar is not None and followed:
                self._grammar.rollback(len(followed))
        return num_rows if is_bound or num_rows <= len(drafts) else 0

    def fill(self, row: Bitmask) -> bool:
        """Write to ``row`` [words] which tokens may come next. Returns False, and writes nothing, if all may.

        Raises ``GrammarEnd`` if the request ends here, ``GrammarError`` if no token can follow.
        """
        self.forced = None
        if self._is_in_budget and not self._num_left:
            assert self._reasoning is not None
            # The row alone would not do: allowed_token_ids or bad_words of the same request may forbid this token,
            # which would leave no token at all. The sampler puts the forced one through after all of them.
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

    def _follow(self, draft: int, followed: list[int]) -> bool:
        """Follow a draft, and add to ``followed`` the tokens that the grammar follows for it. Returns False if nothing
        may come after the draft in this step."""
        answer: Sequence[int] = (draft,) if self._reasoning is None else self._reasoning.feed((draft,))
        self.num_seen += 1
        if self._grammar is None or not answer:
            return True
        if self._grammar.is_end(draft) or self._grammar.num_allowed(answer) < len(answer):
            return False
        self._grammar.accept(answer)
        followed += answer
        return True

    @property
    def _is_in_budget(self) -> bool:
        """Whether the next token may be one of a limited reasoning."""
        return self._budget is not None and self._reasoning is not None and not self._reasoning.is_over

    @property
    def _num_left(self) -> int:
        assert self._reasoning is not None
        assert self._budget is not None
        # Tokens count against the budget only within the reasoning. Before it, the model may still begin it, and the
        # start mark costs nothing; at least 1 leaves room for that.
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
