"""The script on a made tree, without a mesh and without pyright."""

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "tools" / "house.py"


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), "--no-hops", "--no-pyright", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_report_has_every_section(tmp_path: Path) -> None:
    (tmp_path / "engine_core").mkdir()
    (tmp_path / "engine_core" / "core.py").write_text("def step():\n    pass\n")
    figures = tmp_path / "figures.json"
    done = _run("--tree", tmp_path, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert [line[3:].split()[0] for line in done.stdout.splitlines() if line.startswith("## ")] == [
        *("Sizes", "Hops", "Files", "Imports", "Rooms", "Imports"),
    ]
    assert done.stdout.count("Not available: left out") == 2
    written = json.loads(figures.read_text())
    assert written["sizes"]["functions"]["longest_name"] == "engine_core/core.py:step"


def test_a_folder_without_the_product_is_refused(tmp_path: Path) -> None:
    done = _run("--tree", tmp_path)
    assert done.returncode == 2
    assert "--tree" in done.stderr


def test_a_check_fails_beyond_a_limit(tmp_path: Path) -> None:
    folder = tmp_path / "engine_core"
    folder.mkdir()
    (folder / "core.py").write_text("def step():\n    # A comment, as the check asks for.\n    pass\n")
    assert _run("--tree", tmp_path, "--check").returncode == 0
    for number in range(68):
        text = f"class Reply{number}:\n    pass\n"
        (folder / f"a{number}.py").write_text(f"# Why.\n{text}")
        (folder / f"b{number}.py").write_text(f"# Why.\n{text}")
    done = _run("--tree", tmp_path, "--check")
    assert done.returncode == 1
    assert "FAIL names borne by several public classes: 68; the limit is " in done.stdout
