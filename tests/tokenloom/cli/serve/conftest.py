"""Takes the place of the mesh that ``tokenloom serve`` would start."""

from typing import Any

import pytest

from tokenloom.cli.serve import serving
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import MeshOutcome


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[MeshOptions]:
    """What meshes would have been started with."""
    started: list[MeshOptions] = []

    def run_mesh(options: MeshOptions, *_: Any) -> MeshOutcome:
        started.append(options)
        return MeshOutcome(interrupted=False, clean=True)

    monkeypatch.setattr(serving, "run_mesh", run_mesh)
    return started
