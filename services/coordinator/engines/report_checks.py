"""Checks what engines report before the coordinator computes with it: one faulty engine must not harm the others."""

import math
from operator import attrgetter

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.coordinator_pb2 import EngineReport, EngineState
from tokenloom.v1.types_pb2 import EngineRole

MAX_REQUESTS = 1 << 24
"""Bound of each count of requests. It is far above what an engine holds, and scores of four times as many, with the
coordinator's own picks, fit into 32 bits."""
MAX_BLOCK_SIZE = 1 << 20
"""Bound of the tokens of a block: tokens of all blocks, of which there are less than 2^32, fit into 64 bits."""

_NO_ROLE, _NO_STATE = EngineRole.ENGINE_ROLE_UNSPECIFIED, EngineState.ENGINE_STATE_UNSPECIFIED
_ROLES, _STATES = frozenset(EngineRole.values()) - {_NO_ROLE}, frozenset(EngineState.values()) - {_NO_STATE}
_COUNTS = ("waiting", "running", "seats", "group_size")
_RATES = (
    "kv_usage",
    "prefill_tokens_per_second",
    "starts_per_second",
    "computed_tokens_per_second",
    "prompt_tokens_per_second",
    "step_seconds",
    "step_requests",
)
_counts_of, _rates_of = attrgetter(*_COUNTS), attrgetter(*_RATES)


def check_identity(report: EngineReport) -> None:
    """Check the first report of a stream. Raises ``InvalidArgument``."""
    identity = report.identity
    if not identity.engine_id:
        raise InvalidArgument("identity.engine_id is empty", "identity.engine_id")
    if identity.epoch != report.hello.epoch:
        raise InvalidArgument("identity.epoch differs from the hello's", "identity.epoch")
    if not identity.address:
        raise InvalidArgument("identity.address is empty", "identity.address")
    if identity.num_kv_blocks == 0 or identity.fingerprint.block_size == 0:
        raise InvalidArgument("identity must state the size of the KV cache", "identity.num_kv_blocks")
    if identity.fingerprint.block_size > MAX_BLOCK_SIZE:
        field = "identity.fingerprint.block_size"
        raise InvalidArgument(f"{field} must be at most {MAX_BLOCK_SIZE}, not {identity.fingerprint.block_size}", field)
    check_report(report)


def check_report(report: EngineReport) -> None:
    """Check any report. Raises ``InvalidArgument``."""
    if report.role not in _ROLES:
        raise InvalidArgument("role is missing or unknown", "role")
    if report.state not in _STATES:
        raise InvalidArgument("state is missing or unknown", "state")
    # One comparison for all fields, since 5,000 reports arrive in a second; the field is only named for the error.
    if max(_counts_of(report)) > MAX_REQUESTS:
        name = next(name for name in _COUNTS if getattr(report, name) > MAX_REQUESTS)
        raise InvalidArgument(f"{name} must be at most {MAX_REQUESTS}, not {getattr(report, name)}", name)
    rates = _rates_of(report)
    if not (min(rates) >= 0 and sum(rates) < math.inf):  # the sum of one that is no number is none either
        name, rate = next((name, rate) for name, rate in zip(_RATES, rates, strict=True) if not 0 <= rate < math.inf)
        raise InvalidArgument(f"{name} must be a finite number and not negative, not {rate}", name)
