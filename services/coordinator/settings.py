"""Settings of the coordinator."""

from typing import ClassVar

from pydantic import Field

from ..runtime.settings import ServiceSettings
from .registry import SETTLE_SECONDS


class CoordinatorSettings(ServiceSettings):
    service: ClassVar[str] = "coordinator"

    max_waiting: int = Field(1024, ge=1, description="Requests that may wait on one engine before it gets no more.")
    settle_seconds: float = Field(
        SETTLE_SECONDS, ge=0, description="Seconds that a new coordinator waits for engines to re-join."
    )
