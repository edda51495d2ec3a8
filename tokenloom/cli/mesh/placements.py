"""Says how coordinators compare engines, as gateways show it in their metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PREFIX = "tokenloom_placement_"
_RULE = PREFIX + "rule"


@dataclass(frozen=True)
class PartPlacement:
    """Describes a coordinator, or an engine as a coordinator compares it, as ``--json`` prints it."""

    rule: str | None
    """The coordinator's ``--placement``; None: its release does not show it."""
    values: dict[str, float] = field(default_factory=dict)
    """What the rule compares of an engine and computes that from, such as waiting, running and score."""

    def __str__(self) -> str:
        """Say how the value comes about; of a coordinator only the rule."""
        if not self.values:
            return self.rule or "-"
        waiting, running, score = (self.values.get(name, 0.0) for name in ("waiting", "running", "score"))
        if self.rule != "cost":
            return f"{waiting:.0f} * 4 + {running:.0f} = {score:.0f}"
        seconds, tokens, rate, seats = (
            self.values.get(name, 0.0)
            for name in ("expected_seconds", "uncached_tokens", "uncached_tokens_per_second", "seats")
        )
        return f"{seconds:.2f} s: {tokens:,.0f} tokens at {rate:,.0f}/s, {waiting + running:.0f} of {seats:.0f} seats"


@dataclass(frozen=True)
class MeshPlacement:
    """Holds what one or more gateways show: rules by model, and values by engine."""

    rules: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    """Of each engine the model of its mesh, and its values."""

    def of(self, service: str, index: int, model: str) -> PartPlacement | None:
        """Return what is known of a part; None: nothing, or it has no say in placement."""
        if service == "coordinator":
            rule = self.rules.get(model) or next(iter(self.rules.values()), None)
            return None if rule is None else PartPlacement(rule)
        if (found := self.engines.get(f"{service}-{index}")) is None:
            return None
        of_model, values = found
        return PartPlacement(self.rules.get(of_model), values)


def merged(several: Iterable[MeshPlacement]) -> MeshPlacement:
    """Return what several gateways show together; the first one that knows an engine decides."""
    rules: dict[str, str] = {}
    engines: dict[str, tuple[str, dict[str, float]]] = {}
    for each in several:
        rules = {**each.rules, **rules}
        engines = {**each.engines, **engines}
    return MeshPlacement(rules, engines)


class PlacementSamples:
    """Gathers the samples of one scrape."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._engines: dict[str, tuple[str, dict[str, float]]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take a sample whose name begins with :data:`PREFIX`."""
        model = labels.get("model_name", "")
        if name == _RULE:
            self._rules[model] = labels.get("rule", "")
        elif engine := labels.get("engine"):
            self._engines.setdefault(engine, (model, {}))[1][name.removeprefix(PREFIX)] = value

    def all(self) -> MeshPlacement:
        return MeshPlacement(self._rules, self._engines)
