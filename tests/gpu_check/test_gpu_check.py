"""The check itself, without a GPU: it will first meet one elsewhere."""

import json
import os
import subprocess
import sys

import torch
from safetensors import safe_open

from tests.gpu_check import start, tokens
from tests.gpu_check.rows import Rows
from tokenloom.bench.random_model import write_zero_model


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start.main() == 0
    line = capsys.readouterr().out
    assert line.startswith("gpu-check: skipped: ")
    assert line.count("\n") == 1


def test_the_linked_packages_are_those_of_the_clone(tmp_path):
    start.link_packages(start.ROOT, tmp_path)
    program = (
        "import tests, tests.gpu_check.driver as a, tokenloom.bench.random_model as b; print(a.__file__, b.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True)
    assert all(path.startswith(str(tmp_path)) for path in found.split())


def test_a_section_that_hangs_or_fails_is_a_row_and_stops_no_other(tmp_path, capsys):
    hang, fail, well = ("-c", "import time; time.sleep(60)"), ("-c", "raise SystemExit(3)"), ("-c", "")
    ended = [start.run_section("x", 1.0, tmp_path, tmp_path, command) for command in (hang, fail, well)]
    assert ended == [False, False, True]
    rows = [json.loads(line) for line in (tmp_path / "sections.jsonl").read_text().splitlines()]
    assert [row["ok"] for row in rows] == ended
    assert "was stopped at its deadline" in capsys.readouterr().out


def test_the_sections_fit_into_eight_minutes():
    assert sum(start.DEADLINES.values()) <= 480


def test_the_references_are_those_of_a_cpu(tmp_path):
    """Together, in both dtypes, and alone; on tensors of the CPU."""
    tokens.run(Rows("tokens", tmp_path), device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["different"] for row in rows[:2]] == [0, 0]
    assert [row["different_when_alone"] for row in rows] == [0] * 4


def test_a_model_of_zeros_takes_no_room(tmp_path):
    write_zero_model("llama-8b", tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 16e9
    assert file.stat().st_blocks * 512 < 1 << 20
    with safe_open(file, "pt") as tensors:
        assert tensors.get_slice("model.layers.31.mlp.down_proj.weight").get_shape() == [4096, 14336]
