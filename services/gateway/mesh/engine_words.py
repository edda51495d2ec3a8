"""Names the role and the state of an engine for clients, without the prefixes of the protos."""

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


def _state(state: int) -> str:
    """Return the name of a state; that of a newer release's coordinator may be unknown."""
    names = {number: name for name, number in coordinator_pb2.EngineState.items()}
    return names[state].removeprefix("ENGINE_STATE_").lower() if state in names else f"unknown ({state})"
