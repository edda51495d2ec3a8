"""Describes LoRA adapters: between worker and core, and between core and client."""

import enum

import msgspec


class LoraInfo(msgspec.Struct, frozen=True, array_like=True):
    """Describes an adapter that a worker has read."""

    digest: bytes
    """SHA-256 over its files."""
    rank: int


class LoraState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Describes an adapter that requests may name."""

    name: str
    digest: bytes
    path: str
    """The directory from which it was read."""
    rank: int
    pinned: bool
    in_slot: bool
    """Whether it occupies a slot of the device."""
    num_waiting: int
    """Requests with it that wait."""
    num_running: int


class LoraErrorKind(enum.IntEnum):
    """Says why an operation on adapters failed."""

    INVALID = 0
    """The files are not an adapter of this model."""
    CONFLICT = 1
    """Another adapter has the name, or the files are others than expected."""
    FULL = 2
    """Every adapter that could make room is pinned or in use."""
    NOT_FOUND = 3
    """No adapter has the name."""


class LoraAnswer(msgspec.Struct, array_like=True):
    """Answers an operation on adapters."""

    adapters: list[LoraState]
    """All that are loaded now, by name."""
    error: str = ""
    """Why the operation failed; empty: it did not."""
    kind: LoraErrorKind = LoraErrorKind.INVALID
