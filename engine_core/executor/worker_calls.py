"""Calls of a worker's methods by name, of the few declared ones."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ..wire.serialization import call_with_raw, to_raw
from ..worker import Worker

CLIENT_METHODS: Final = frozenset({"profile", "resident_bytes"})
"""What a core's clients may call too: nothing that the core must know of."""
WORKER_METHODS: Final = CLIENT_METHODS | {
    *("load_model", "determine_available_memory", "initialize_kv_cache"),
    *("sleep", "wake_up", "reload_weights"),
}
"""What may be called by name; arguments and results are msgspec types."""


def call_worker(worker: Worker, method: str, args: Sequence[msgspec.Raw]) -> msgspec.Raw:
    """Calls ``method`` with arguments decoded to the types it annotates. Raises ``ValueError`` for a name that is not
    declared, or that this kind of worker has not."""
    function: Callable[..., object] | None = getattr(worker, method, None) if method in WORKER_METHODS else None
    if function is None:
        raise ValueError(
            f"{type(worker).__name__} has no method {method!r} to call; declared: {sorted(WORKER_METHODS)}"
        )
    return to_raw(call_with_raw(function, args))
