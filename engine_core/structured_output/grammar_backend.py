"""Defines the protocols of a grammar backend, which compiles constraints and follows outputs through them.

JSON schemas are prepared for compiling: an object holds only the properties that its schema names.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..data.core_params import StructuredOutput

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")
_COMBINING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")


def close_objects(source: str) -> str:
    """Return the schema with ``additionalProperties: false`` in each object that names properties and does not mention
    others, as vLLM's default backend does: a model would fill an open object until its tokens end.

    A schema that combines parts (``allOf``, ``not``, ``properties`` together with ``anyOf``) is returned unchanged:
    closing one part would forbid what another one names. Raises ``ValueError`` if the source is not JSON.
    """
    schema = json.loads(source)
    parts = list(_parts(schema))
    if any(map(_combines, parts)):
        return source
    for part in parts:
        # pydantic and most tools leave additionalProperties out. llguidance alone then allows any property, and a small
        # model fills an open object until its tokens end.
        if _names_all(part):
            part["additionalProperties"] = False
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those within it, except values of ``const`` or ``enum`` that only look like a schema."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _MAPS:
        if isinstance(schemas := schema.get(name), dict):
            for each in schemas.values():
                yield from _parts(each)
    for name in _LISTS:
        if isinstance(schemas := schema.get(name), list):
            for each in schemas:
                yield from _parts(each)
    for name in _SINGLE:
        yield from _parts(schema.get(name))


def _combines(part: dict[str, Any]) -> bool:
    return any(name in part for name in _COMBINING) or (
        "properties" in part and any(name in part for name in _ALTERNATIVES)
    )


def _names_all(part: dict[str, Any]) -> bool:
    """Return whether the named properties suffice for an object; False if the part is malformed."""
    named, required, least = part.get("properties"), part.get("required", []), part.get("minProperties", 0)
    if not isinstance(named, dict) or "additionalProperties" in part or "patternProperties" in part:
        return False
    if not isinstance(required, list) or not isinstance(least, int):
        return False
    return all(isinstance(name, str) and name in named for name in required) and least <= len(named)


Bitmask = npt.NDArray[np.int32]
"""[ceil(vocab / 32)] or [n, ceil(vocab / 32)]: token t is allowed if bit t % 32 of word t // 32 is set."""


class GrammarError(ValueError):
    """A constraint is not valid, is too complex, or does not allow a token. The message is meant for a client."""


class Grammar(Protocol):
    """Follows one output through a compiled grammar. Used by one thread at a time."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Follow these tokens. Raises ``GrammarError`` for one that is not allowed; only ``reset`` may follow."""

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come next, without following them."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens."""

    def reset(self) -> None:
        """Take back all accepted tokens."""

    def fill_bitmask(self, row: Bitmask) -> None:
        """Write the tokens that may come next, including the end tokens where the text may end.

        Raises ``GrammarError`` if computing them would take too long.
        """


class CompiledGrammar(Protocol):
    """Holds a grammar that many outputs may follow. Usable from any thread."""

    def start(self) -> Grammar:
        """Return the state at the beginning of an output."""


class StructuredOutputBackend(Protocol):
    """Compiles constraints for one tokenizer. Usable from any thread."""

    COMPILE_BYTES: int
    """The memory limit for compiling one constraint."""
    eos_token_ids: tuple[int, ...]
    """The tokens that mean the end of the text in its bitmasks; at least one."""

    def prepare(self, constraint: StructuredOutput) -> str:
        """Do the part of compiling that could take too long; it is called in a process that can be killed.

        Returns what :meth:`load` makes a grammar of in a short time. Raises ``GrammarError``.
        """

    def load(self, prepared: str) -> CompiledGrammar:
        """Return the grammar. Raises ``GrammarError``."""


def bitmask_of(token_ids: Iterable[int], num_words: int) -> Bitmask:
    """Return a bitmask [num_words] with the bits of these tokens set; larger ids are ignored."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
