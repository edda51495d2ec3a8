"""Describes what one engine does, as the planner sees it. No I/O."""

from dataclasses import dataclass
from enum import StrEnum

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineState
from tokenloom.v1.types_pb2 import EngineRole


class PlannedRole(StrEnum):
    """Which legs of requests an engine takes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


ROLES = {
    EngineRole.ENGINE_ROLE_BOTH: PlannedRole.BOTH,
    EngineRole.ENGINE_ROLE_PREFILL: PlannedRole.PREFILL,
    EngineRole.ENGINE_ROLE_DECODE: PlannedRole.DECODE,
}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Describes one serving engine.

    Attributes:
        name: Its id; of a Kubernetes pod, the pod's name.
        address: Of its services.
        model: The model that it serves: engines of different models are planned separately.
        waiting: Requests that wait, those on their way included.
        running: Requests in its batch.
        waiting_tokens: Prompt tokens of waiting requests that are not computed yet.
        kv_usage: Share of its KV blocks that requests hold, in [0, 1].
        seats: Requests that may run at the same time.
        step_seconds: Mean duration of a step, which is the time between two tokens; 0: not known.
        step_requests: Mean requests in the batch of those steps.
        starts_per_second: Requests that begin per second while others wait for a place in the batch; 0: not known.
        prompt_tokens_per_second: Prompt tokens that it prefilled lately, per second of all time.
        prefill_tokens_per_second: What it prefills per second while prompts wait; 0: not known.
    """

    name: str
    role: PlannedRole
    address: str = ""
    model: str = ""
    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    seats: int = 0
    step_seconds: float = 0.0
    step_requests: float = 0.0
    starts_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0

    @classmethod
    def of(cls, entry: EngineEntry) -> "EngineLoad | None":
        """Return what a snapshot says of an engine; None unless it serves."""
        report = entry.report
        if report.state != EngineState.ENGINE_STATE_SERVING:
            return None
        return cls(
            name=entry.identity.engine_id,
            role=ROLES.get(report.role, PlannedRole.BOTH),
            address=entry.identity.address,
            model=entry.identity.fingerprint.model,
            waiting=entry.waiting,
            running=report.running,
            waiting_tokens=entry.waiting_tokens,
            kv_usage=report.kv_usage,
            seats=report.seats,
            step_seconds=report.step_seconds,
            step_requests=report.step_requests,
            starts_per_second=report.starts_per_second,
            prompt_tokens_per_second=report.prompt_tokens_per_second,
            prefill_tokens_per_second=report.prefill_tokens_per_second,
        )
