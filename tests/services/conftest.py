"""What the tests of all services share."""

import pytest

from tokenloom.services.runtime.host import listener


@pytest.fixture(autouse=True)
def no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a service without the times in which its last gRPC client makes its next call: thousands end here."""
    monkeypatch.setattr(listener, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(listener, "_GOAWAY_SECONDS", 0.0)
