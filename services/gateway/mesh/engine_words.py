"""Names the role and the state of an engine for clients, without the prefixes of the protos."""

from tokenloom.v1 import coordinator_pb2, types_pb2


def engine_words(entry: coordinator_pb2.EngineEntry) -> dict[str, object]:
    """Return ``role`` and ``state`` of an engine as the coordinator last reported them, such as ``decode``."""
    return {
        "role": types_pb2.EngineRole.Name(entry.report.role).removeprefix("ENGINE_ROLE_").lower(),
        "state": coordinator_pb2.EngineState.Name(entry.report.state).removeprefix("ENGINE_STATE_").lower(),
    }
