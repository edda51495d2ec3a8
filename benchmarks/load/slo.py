"""Computes goodput, which counts only requests that meet their service level objectives."""

from collections.abc import Sequence
from dataclasses import dataclass

from .events import Outcome

_MEASURES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Objectives:
    """Maps measures to bounds in milliseconds. Without any, every successful request is good."""

    bounds: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objectives":
        """Parse bounds such as ``ttft:500``, separated by spaces or commas. Raises ``ValueError``."""
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
        """Return whether a successful request kept all bounds."""
        measured = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
        return all(measured[name] * 1e3 <= bound for name, bound in self.bounds.items())
