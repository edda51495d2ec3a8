"""Counts the files that know a sampling parameter."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .source_tree import SourceTree

PARAMETERS = ("min_p", "bad_words", "logprob_token_ids")
"""Parameters that are counted: a number, a list of strings and a list of tokens."""


@dataclass(frozen=True)
class Parameter:
    """Lists the files whose text contains a parameter's name as a whole word."""

    name: str
    python: list[str]
    """Modules of the product, without generated stubs."""
    contracts: list[str]
    """``.proto`` files."""


def find_parameters(tree: SourceTree, names: Sequence[str] = PARAMETERS) -> list[Parameter]:
    """Search the product and its contracts, comments included. ``min_p`` does not match ``_min_p`` or ``min_ps``."""
    found = []
    for name in names:
        word = re.compile(rf"\b{re.escape(name)}\b")
        python, contracts = (
            [source.path for source in sources if word.search(source.text)]
            for sources in (tree.product, tree.contracts)
        )
        found.append(Parameter(name, python, contracts))
    return found
