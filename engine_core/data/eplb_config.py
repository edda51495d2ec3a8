"""Configures how experts are moved between ranks by their load (EPLB)."""

from typing import Annotated

from msgspec import Meta, Struct

_Steps = Annotated[int, Meta(ge=1)]


class EplbConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When experts are moved, and how many copies there are. Users write it as JSON (names and defaults as in vLLM,
    apart from ``move_bytes``)."""

    window_size: _Steps = 1000
    """How many of the latest steps count as an expert's load."""
    step_interval: _Steps = 3000
    """Steps from one plan to the next."""
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    """Copies of experts in each layer, on all ranks together, beside one of each. With the model's experts they must
    be a multiple of the ranks."""
    log_balancedness: bool = False
    """Log with each plan how evenly the ranks were loaded."""
    move_bytes: Annotated[int, Meta(ge=1 << 10)] = 32 << 20
    """Most bytes of weights that a rank receives in a step."""
