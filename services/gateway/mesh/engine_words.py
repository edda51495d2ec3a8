"""Describes an engine for clients: its role and state without the prefixes of the protos, and what placement sees."""

from tokenloom.v1 import coordinator_pb2, types_pb2


def engine_words(entry: coordinator_pb2.EngineEntry) -> dict[str, object]:
    """Return ``role`` and ``state`` of an engine as the coordinator last reported them, such as ``decode``, and what it
    does without."""
    report = entry.report
    fall_backs = {each.kind: each.detail for each in report.fall_backs}
    return {
        "role": types_pb2.EngineRole.Name(report.role).removeprefix("ENGINE_ROLE_").lower(),
        "state": "aside" if "other_weights" in fall_backs else _state(report.state),
        **({"fall_backs": fall_backs} if fall_backs else {}),
    }


def rule_word(rule: coordinator_pb2.PlacementRule) -> str | None:
    """Return the value of ``--placement`` of the coordinator; None: it is of a release that does not show it."""
    words = {
        coordinator_pb2.PlacementRule.PLACEMENT_RULE_SCORE: "score",
        coordinator_pb2.PlacementRule.PLACEMENT_RULE_COST: "cost",
    }
    return words.get(rule)


def placement_values(entry: coordinator_pb2.EngineEntry, rule: str | None) -> dict[str, float]:
    """Return what a rule compares of an engine, and what it computes that from; see ``PlacementRule``."""
    report = entry.report
    values: dict[str, float] = {"waiting": entry.waiting, "running": report.running, "score": entry.score}
    if rule == "cost":
        values |= {
            "seats": report.seats,
            "step_seconds": report.step_seconds,
            "uncached_tokens": entry.uncached_tokens,
            "uncached_tokens_per_second": entry.uncached_tokens_per_second,
            "expected_seconds": entry.expected_seconds,
        }
    return values


def _state(state: int) -> str:
    """Return the name of a state; that of a newer release's coordinator may be unknown."""
    names = {number: name for name, number in coordinator_pb2.EngineState.items()}
    return names[state].removeprefix("ENGINE_STATE_").lower() if state in names else f"unknown ({state})"
