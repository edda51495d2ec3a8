"""A disk whose writes are durable at once."""

import os

import pytest


@pytest.fixture(autouse=True)
def immediate_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the wait for the device, which only a power failure could show: the crash at any write syncs 2,500
    times, 2 to 4 ms each, and more on a busy disk. ``Writes`` still counts the calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
