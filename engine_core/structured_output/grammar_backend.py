"""What a grammar backend does for the core: compiles constraints, follows outputs through them, says what may come."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..wire.core_sampling_params import GrammarKind

Bitmask = npt.NDArray[np.int32]
"""[ceil(vocab / 32)] or [n, ceil(vocab / 32)]: token t may come if bit t % 32 of word t // 32 is set."""


class GrammarError(ValueError):
    """A constraint that is no grammar, is too complex, or does not allow a token; fit for a client."""


class Grammar(Protocol):
    """One output's way through a compiled grammar. Used by one thread at a time."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Goes on by these tokens. Raises ``GrammarError`` for one that may not come; then only ``reset`` is left."""

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next. Changes nothing."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""

    def reset(self) -> None:
        """Takes back all of them."""

    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing but its end may follow."""

    def fill_bitmask(self, row: Bitmask) -> None:
        """Writes what may come next; an end token may where the text may end. Raises ``GrammarError`` when finding out
        would take too long."""


class CompiledGrammar(Protocol):
    """What many outputs may follow. Usable from any thread."""

    def start(self) -> Grammar:
        """At the beginning of an output."""


class StructuredOutputBackend(Protocol):
    """Compiles constraints for one tokenizer. Usable from any thread."""

    COMPILE_BYTES: int
    """How much memory compiling one constraint may take."""
    eos_token_ids: tuple[int, ...]
    """The tokens that stand for the end of a text in its bitmasks; at least one."""

    def prepare(self, kind: GrammarKind, source: str) -> str:
        """Everything about compiling that could take too long, so it is called in a process that may be killed.

        Returns what :meth:`load` makes a grammar of without surprises. Raises ``GrammarError``.
        """

    def load(self, prepared: str) -> CompiledGrammar:
        """The grammar. Raises ``GrammarError``."""


def bitmask_of(token_ids: Iterable[int], num_words: int) -> Bitmask:
    """[num_words] with the bits of these tokens set; ids beyond are left out."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
