"""What the commands' tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tokenloom.cli.fake_server import FakeServer


@pytest.fixture(autouse=True)
def runtime_dir(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No mesh but the test's own is found, and no server named by the environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "TOKENLOOM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return socket_dir


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()
