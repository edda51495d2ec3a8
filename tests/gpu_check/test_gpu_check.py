"""The check itself, without a GPU: it will first meet one elsewhere, for minutes."""

import gzip
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests.gpu_check import ceilings, compare, kv, llama_8b, model, start, tokens, traces
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import CPU, Target


def found(rows: Rows) -> list[dict]:
    return start.lines_of(rows.file)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start.main() == 0
    line = capsys.readouterr().out
    assert line.startswith("gpu-check: skipped: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("text", ["2.10.1", "1.13.0+cu118"])
def test_an_old_pytorch_is_named(text, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", text)
    assert start.main() == 1
    assert f"needs Python 3.11 and PyTorch 2.11, not {sys.version.split()[0]} and {text}" in capsys.readouterr().out
    assert start.version("2.11.0a0+git") >= start.LEAST_TORCH


def test_an_unknown_section_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["start.py", "kernels", "speed"])
    monkeypatch.setenv("GPU_CHECK_RESULTS", str(tmp_path))
    assert start.main() == 1
    assert "unknown sections speed; there are ceilings, kernels," in capsys.readouterr().out


def test_the_linked_packages_are_those_of_the_clone_and_of_the_wheels(tmp_path):
    wheels, folder = tmp_path / "wheels", tmp_path / "linked"
    wheels.mkdir()
    folder.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "")
    start.link_packages(start.ROOT, folder)
    start.unpack_wheels(str(wheels), folder)
    start.unpack_wheels("", folder)
    program = (
        "import tests, tests.gpu_check.driver as a, tokenloom.bench.random_model as b, carried as c\n"
        "print(a.__file__, b.__file__, c.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(folder)}
    files = subprocess.check_output([sys.executable, "-c", program], cwd=folder, env=environment, text=True)
    assert all(path.startswith(str(folder)) for path in files.split())


_FAKE = """
import os, pathlib, signal, subprocess, sys, time
name, results = sys.argv[1:]
(pathlib.Path(results) / "rows.jsonl").open("a").write('{"section": "%s", "name": "row", "ms": 1.5}\\n' % name)
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (pathlib.Path(results) / "child").write_text(str(child.pid))
    time.sleep(600)
if name == "raises":
    raise RuntimeError("a mistake of the section")
if name == "is killed":
    (pathlib.Path(results) / "rows.jsonl").open("a").write('{"section": "is ki')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_section_that_hangs_fails_or_is_killed_is_a_row_and_stops_no_other(tmp_path, capsys):
    deadlines = {"hangs": 2.0, "raises": 60.0, "is killed": 60.0, "works": 60.0}
    command = ("-c", _FAKE)
    end = time.monotonic() + 1000
    assert start.run_sections(list(deadlines), tmp_path, tmp_path, end, command, deadlines) == [
        "hangs", "raises", "is killed",
    ]  # fmt: skip
    reasons = {row["section"]: row["end"] for row in start.lines_of(tmp_path / "sections.jsonl")}
    assert reasons == {
        "hangs": "was stopped at its deadline of 2 s",
        "raises": "ended with 1",
        "is killed": "was killed by signal 9",
        "works": "ended with 0",
    }
    table = (tmp_path / "table.md").read_text()
    assert "| hangs | row | ms 1.5 |" in table
    assert "| is killed | **failed** | was killed by signal 9 after" in table
    assert "== hangs was stopped" in capsys.readouterr().out
    assert not _is_running(int((tmp_path / "child").read_text()))  # what a section started ends with it


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_section_runs_past_the_end_of_all(tmp_path):
    started = time.monotonic()
    command = ("-c", "import time; time.sleep(600)")
    assert start.run_sections(["a", "b"], tmp_path, tmp_path, started + 1.0, command, {"a": 600.0, "b": 600.0})
    assert time.monotonic() - started < 60


def test_the_sections_fit_into_eight_minutes():
    assert sum(start.DEADLINES.values()) <= start.SECONDS == 480


def test_the_ceilings(tmp_path):
    rows = Rows("ceilings", tmp_path)
    ceilings.run(rows, CPU)
    assert rows.find(ceilings.READ, "gb_per_s") > 0
    assert rows.find(ceilings.PRODUCT, "tflop_per_s") > 0
    assert rows.find("none such", "ms") == 0


def test_the_references_are_those_of_a_cpu(tmp_path):
    """Together, alone, with overlapping steps, and preempted; on tensors of the CPU."""
    rows = Rows("tokens", tmp_path)
    tokens.run(rows, CPU)
    by_name = {row["name"]: row for row in found(rows)}
    for kind in ("eager", "graphs", "async", "preempted"):
        assert by_name[f"tokens, float32, {kind}"]["different"] == 0
        assert f"tokens, bfloat16, {kind}" in by_name
    assert by_name["tokens, float32, preempted"]["preemptions"] > 0
    assert by_name["tokens, float32, eager"]["mean_logprob_gap"] < 1e-4
    assert 0 < by_name["tokens, bfloat16, eager"]["mean_logprob_gap"] < 2e-2
    assert all(row.get("different_when_alone", 0) == 0 for row in by_name.values())


def test_the_references_are_small_and_long_enough():
    texts = json.loads(tokens.REFERENCES.read_text())["logprobs"]
    assert sum(map(len, texts)) >= 2000
    assert tokens.REFERENCES.stat().st_size <= 1 << 20


def test_the_steps_of_a_model(tmp_path):
    rows = Rows("model", tmp_path)
    rows.add(ceilings.READ, gb_per_s=1.0)
    model.run(rows, CPU)
    names = [row["name"] for row in found(rows)]
    assert names[2:] == [f"8B, {count} decodes of {length}" for length in (16, 40) for count in (1, 3)] + [
        "8B, prefill of 128"
    ]
    assert all(row["ms"] > 0 for row in found(rows)[2:])
    assert found(rows)[2]["share_of_ceiling"] > 0


def test_kv_between_two_processes(tmp_path):
    rows = Rows("kv", tmp_path)
    kv.run(rows, CPU)
    by_name = {row["name"]: row for row in found(rows)}
    assert by_name["KV, cuda"]["note"] == "the owner could not serve it"  # there is no driver
    for name in ("shm", "socket"):
        assert by_name[f"KV, {name}, scattered"]["gb_per_s"] > 0
        assert "slower" in by_name[f"the same while KV moves by {name}"]


def test_the_comparison_and_its_trace(tmp_path):
    rows = Rows("compare", tmp_path)
    compare.run(rows, CPU)
    names = [row["name"] for row in found(rows)]
    assert sum(name.startswith("kernel ") for name in names) == 20
    assert names[-1] == "2 requests of 8 + 4: ours by transformers"
    assert json.loads(gzip.decompress((tmp_path / "decode.json.gz").read_bytes()))["traceEvents"]


def test_a_trace_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "LARGEST_TRACE", 10)
    rows = Rows("compare", tmp_path)
    traces.keep(rows, traces.profiled(CPU, lambda: torch.ones(2) + 1, 1), "t.json.gz")
    assert found(rows)[0]["kept"] == "False"
    assert not (tmp_path / "t.json.gz").exists()


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0.0),
        ([(0, 1)], 0.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(2, 4), (0, 3), (1, 2)], 0.0),
        ([(0, 8), (2, 3), (9, 10)], 0.1),
    ],
)
def test_the_idle_share_counts_overlapping_kernels_once(spans, idle):
    assert traces.idle_between(spans) == pytest.approx(idle)


def test_the_8b_has_the_shape_of_llama_3_1(tmp_path):
    config = llama_8b.write_config(tmp_path, Target(torch.device("meta")), num_layers=8)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (4096, 8, 128_256)
