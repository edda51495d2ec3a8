"""Goodput: only requests that meet their service level objectives count."""

from collections.abc import Sequence
from dataclasses import dataclass

from .events import Outcome

_MEASURES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Objectives:
    """Bounds in milliseconds by measure; none: every request that went well is good."""

    bounds: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objectives":
        """From ``ttft:500`` and the like; several in one text are parted by spaces or commas. Raises ``ValueError``."""
        bounds = {}
        for text in " ".join(texts).replace(",", " ").split():
            name, _, value = text.partition(":")
            if name not in _MEASURES:
                raise ValueError(f"goodput: {text!r} must begin with one of {', '.join(_MEASURES)}, as in ttft:500")
            try:
                bounds[name] = float(value)
            except ValueError:
                raise ValueError(f"goodput: {text!r} needs milliseconds after the colon, as in {name}:500") from None
        return cls(bounds)

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request that went well kept all the bounds."""
        measured = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
        return all(measured[name] * 1e3 <= bound for name, bound in self.bounds.items())
