"""What an examination found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..refusal import CannotServe

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line for the user."""

    level: Level
    """``fail``: ``tokenloom serve`` would not start; ``warn``: it would be slower, or lack something."""
    subject: str
    text: str
    """What was found and, unless it is in order, the way out."""


def from_check(subject: str, in_order: str, check: Callable[[], object]) -> Finding:
    """Return the finding of a check that raises ``CannotServe``; ``in_order`` is the text if it does not."""
    try:
        check()
    except CannotServe as refused:
        return Finding("fail", subject, str(refused))
    return Finding("ok", subject, in_order)
