"""Options of the coordinator."""

from typing import Annotated, ClassVar

from msgspec import Meta

from tokenloom.process.plugins import check_named, plugged
from tokenloom.services.runtime.host.limits import GrpcLimits
from tokenloom.services.runtime.host.service_settings import OptionalAddress, ServiceSettings

from .engines.defaults import (
    LEAST_FACTOR,
    PD_THRESHOLD,
    PLACEMENT,
    PLACEMENTS,
    PREFIX_INDEX_MIB,
    SETTLE_SECONDS,
)

MAX_CONNECTIONS = 8192
"""Of each engine two, and one of each output processor, gateway and tokenizer: three times those of a cell."""
_KINDS = ("file", "kubernetes")


def _check_lease(value: str) -> str:
    kind, colon, name = value.partition(":")
    if value and not (colon and name and kind in _KINDS):
        raise ValueError(f"must be file:PATH or kubernetes:NAME, not {value!r:.80}")
    return value


class CoordinatorSettings(ServiceSettings, frozen=True, kw_only=True):
    """How the coordinator places requests."""

    service: ClassVar[str] = "coordinator"

    pd_threshold: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 32) - 1)],
        "Prompts with fewer uncached tokens are computed by a decode engine alone; 0: every prompt is "
        "computed by a prefill engine.",
    ] = PD_THRESHOLD
    placement: Annotated[
        Annotated[str, Meta(extra=plugged("placement_rules", PLACEMENTS))],
        "How engines are compared. score: waiting * 4 + running, less 4 times the share of the prompt that is cached "
        "there; cost: the seconds that a request is expected to cost there: uncached prompt tokens ahead of it and its "
        "own at the engine's rate, and its share of the batch; or a plugin, as PACKAGE:NAME.",
    ] = PLACEMENT
    sessions: Annotated[
        bool, "Send the turns of a session to the engine that has its KV, and let engines keep that for its next turn."
    ] = True
    mixed_numerics: Annotated[
        bool,
        "Let a request that began on an engine of ours go on where vLLM computes (--remote-vllm), and the reverse: its "
        "answer says mixed_numerics. Otherwise it waits for an engine of the kind on which it began.",
    ] = False
    rebalance: Annotated[
        Annotated[float, Meta(ge=0, le=100)],
        "Let running requests of an engine go on at another one, with their KV, when for 3 s its waiting * 4 + "
        "running, or its use of a KV cache that is 80 % full, has been so many times that of the engine of its kind "
        "that has least to do: 1.2 or more; 0: never. Needs --kv-transports at the engines.",
    ] = 0.0
    settle_seconds: Annotated[
        Annotated[float, Meta(ge=0)],
        "Seconds that a new coordinator waits for the engines to register again; up to 30 more while they still come.",
    ] = SETTLE_SECONDS
    lease: Annotated[
        Annotated[str, Meta(extra={"check": _check_lease})],
        "What one of several coordinators holds while the others stand by: file:PATH, a lock between processes of one "
        "machine, or kubernetes:NAME, a Lease in the pod's namespace; empty: there is one coordinator.",
    ] = ""
    coordinator: Annotated[
        OptionalAddress, "Address at which a coordinator that stands by follows the active one; empty: --listen."
    ] = ""
    prefix_index_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)],
        "Memory, in MiB, for which prefixes the engines have in their caches; a small mesh needs less and takes less.",
    ] = PREFIX_INDEX_MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        check_named(self.plugins, placement=self.placement)
        if 0 < self.rebalance < LEAST_FACTOR:
            raise ValueError(f"--rebalance: must be 0 or at least {LEAST_FACTOR}, not {self.rebalance:g}")

    @property
    def grpc_limits(self) -> GrpcLimits:
        """The limits of the gRPC server. Engines report every second: silence shows there first, without pings."""
        # With gRPC servers' usual bound here, 1,024, the last of a thousand engines never joined: each keeps two
        # connections. On a machine that starves them, impatient pings cut off those that were about to join, again and
        # again.
        return GrpcLimits(connections=MAX_CONNECTIONS, is_patient=True)
