"""Which modules are needed by others, from their text."""

from pathlib import Path

from tools.wheels.closure import modules_of

TREE = {
    "pack/__init__.py": "",
    "pack/client/__init__.py": "from . import calls\nfrom ..request.errors import Failed",
    "pack/client/calls.py": "import numpy\n\ndef call():\n    import pack.request.lazy",
    "pack/request/__init__.py": "",
    "pack/request/errors.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .only_types import X\n"
        "else:\n    from . import other"
    ),
    "pack/request/lazy.py": "from __future__ import annotations\nfrom pack.client import calls",
    "pack/request/only_types.py": "",
    "pack/request/other.py": "",
    "pack/unneeded.py": "import pack.client",
}


def test_all_that_a_package_runs_and_nothing_else(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = modules_of(tmp_path, "pack", ["pack.client"])
    assert {path.relative_to(tmp_path).as_posix() for path in found.values()} == TREE.keys() - {
        "pack/unneeded.py",
        "pack/request/only_types.py",
    }
    assert found["pack.request"] == tmp_path / "pack/request/__init__.py"
