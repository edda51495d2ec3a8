"""Settings of the coordinator."""

from typing import ClassVar

from pydantic import Field

from tokenloom.services.runtime.host.service_settings import ServiceSettings

from .engine_placement import PD_THRESHOLD
from .engine_registry import SETTLE_SECONDS


class CoordinatorSettings(ServiceSettings):
    service: ClassVar[str] = "coordinator"

    max_waiting: int = Field(1024, ge=1, description="Requests that may wait on one engine before it gets no more.")
    pd_threshold: int = Field(
        PD_THRESHOLD,
        ge=0,
        le=(1 << 32) - 1,
        description="Prompts with fewer uncached tokens go whole to a decode engine; 0: always a pair.",
    )
    settle_seconds: float = Field(
        SETTLE_SECONDS, ge=0, description="Seconds that a new coordinator waits for engines to re-join."
    )
