"""Sections of the check on a GPU that launch kernels, in Triton's interpreter with tiny shapes: not one may end by a
mistake of its own on the machine that is lent for minutes."""

import json

import pytest
import torch

from tests.gpu_check import kernels, sampler_kernels, speeds
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("part", kernels.PARTS)
def test_kernels(part, dtype, tmp_path):
    assert not kernels.check(Rows("kernels", tmp_path), CPU, part, dtype)
    assert (tmp_path / "rows.jsonl").read_text()


def test_what_draws_and_what_changes_logits(tmp_path):
    rows = Rows("kernels", tmp_path)
    assert not sampler_kernels.check_draws(rows, CPU)
    assert not sampler_kernels.check_asking_rows(rows, CPU)


def test_speeds(tmp_path):
    rows = Rows("speeds", tmp_path)
    rows.add("read (sum)", gb_per_s=1.0)
    rows.add("product of 8192 x 8192, bf16", tflop_per_s=1.0)
    speeds.run(rows, CPU)
    found = [json.loads(line) for line in rows.file.read_text().splitlines()]
    assert {"share_of_ceiling", "us"} <= found[2].keys()
    assert any(row["name"].startswith("winner") for row in found)
    assert sum("sampler" in row["name"] for row in found) == 6


def test_a_way_that_does_not_work_is_a_row_and_stops_no_other(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(speeds, "TritonLinear", lambda weight: fail)
    rows = Rows("speeds", tmp_path)
    speeds._product(rows, CPU, 1, 64, 32)
    found = {row["name"].rpartition(", ")[2]: row for row in map(json.loads, rows.file.read_text().splitlines())}
    assert found["Triton"]["not_run"] == "RuntimeError: no such kernel"
    assert found["cuBLAS"]["us"] > 0
