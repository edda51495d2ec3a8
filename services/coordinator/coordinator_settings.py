"""Options of the coordinator."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from tokenloom.services.runtime.host.service_settings import ServiceSettings

from .defaults import PD_THRESHOLD, PLACEMENT, PREFIX_INDEX_MIB, SETTLE_SECONDS


class CoordinatorSettings(ServiceSettings, frozen=True, kw_only=True):
    """How the coordinator places requests."""

    service: ClassVar[str] = "coordinator"

    pd_threshold: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 32) - 1)],
        "Prompts with fewer uncached tokens are computed by a decode engine alone; 0: every prompt is "
        "computed by a prefill engine.",
    ] = PD_THRESHOLD
    placement: Annotated[
        Literal["score", "cost"],
        "How engines are compared: by 4 * waiting + running requests, or by the seconds that a request is expected to "
        "cost there: uncached prompt tokens ahead of it and its own at the engine's rate, and its share of the batch.",
    ] = PLACEMENT
    settle_seconds: Annotated[
        Annotated[float, Meta(ge=0)], "Seconds that a new coordinator waits for the engines to register again."
    ] = SETTLE_SECONDS
    prefix_index_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)],
        "Memory, in MiB, for which prefixes the engines have in their caches; a small mesh needs less and takes less.",
    ] = PREFIX_INDEX_MIB
