"""The check itself, without a GPU: it will first meet one elsewhere, for minutes."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu_check import (
    ceilings,
    compare,
    features,
    kernels,
    kv,
    llama_8b,
    model,
    pair,
    rehearsal,
    sampler_speeds,
    speeds,
    start,
    target,
    tokens,
    traces,
)
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import CPU, Target


def found(rows: Rows) -> list[dict]:
    return start.lines_of(rows.file)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start.main([]) == 0
    line = capsys.readouterr().out
    assert line.startswith("gpu-check: skipped: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("text", ["2.10.1", "1.13.0+cu118"])
def test_an_old_pytorch_is_named(text, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", text)
    assert start.main([]) == 1
    assert f"needs Python 3.11 and PyTorch 2.11, not {sys.version.split()[0]} and {text}" in capsys.readouterr().out
    assert start.version("2.11.0a0+git") >= start.LEAST_TORCH


def test_an_unknown_section_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start.main(["--sections", "kernels,speed"]) == 1
    assert "unknown sections speed; there are ceilings, kernels," in capsys.readouterr().out


def test_one_line_names_missing_wheels_and_how_to_fetch_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(start, "WHEELS", {"json": "json", "no_such_module": "no-such-package", "no.such": "another"})
    monkeypatch.setattr(start, "run_sections", None)  # nothing runs
    wheels = tmp_path / "wheels"
    assert start.main(["--wheels", str(wheels), "--results", str(tmp_path / "results")]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-check: no-such-package, another cannot be imported: ")
    assert "pip download" in line
    assert line.endswith(f"--dest {wheels} no-such-package another`")
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "no_such_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("no_such_module/__init__.py", "")
        wheel.writestr("no/such/__init__.py", "")
    start.unpack_wheels(wheels, tmp_path)
    assert not start.missing(str(tmp_path))


def test_the_linked_packages_are_those_of_the_clone_and_of_the_wheels(tmp_path):
    wheels, folder = tmp_path / "wheels", tmp_path / "linked"
    wheels.mkdir()
    folder.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "")
    start.link_packages(start.ROOT, folder)
    start.unpack_wheels(wheels, folder)
    start.unpack_wheels(tmp_path / "none such", folder)
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
    print("what it did before")
    raise RuntimeError("a mistake of the section")
if name == "is killed":
    (pathlib.Path(results) / "rows.jsonl").open("a").write('{"section": "is ki')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_section_that_hangs_fails_or_is_killed_is_a_row_and_stops_no_other(tmp_path, capsys):
    stages = ({"hangs": 2.0}, {"raises": 60.0, "is killed": 60.0}, {"works": 60.0})
    command, names = ("-c", _FAKE), ["hangs", "raises", "is killed", "works"]
    end = time.monotonic() + 1000
    assert start.run_sections(names, tmp_path, tmp_path, end, command, stages) == names[:3]
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
    assert "| ceilings | **not run** | |" in table
    assert "    raises: what it did before\n" in table
    assert "    raises: RuntimeError: a mistake of the section\n" in table
    assert "works: " not in (tmp_path / "log.txt").read_text(), "it printed nothing"
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
    stages = ({"a": 600.0}, {"b": 600.0})
    assert start.run_sections(["a", "b"], tmp_path, tmp_path, started + 1.0, command, stages) == ["a", "b"]
    assert time.monotonic() - started < 60


def test_the_sections_fit_into_eight_minutes():
    assert sum(max(stage.values()) for stage in start.STAGES) <= start.SECONDS == 480


def test_what_an_earlier_call_found_in_other_sections_is_kept(tmp_path):
    command, stages, end = ("-c", _FAKE), ({"first": 60.0, "second": 60.0},), time.monotonic() + 1000
    for names in (["first", "second"], ["second"]):
        assert not start.run_sections(names, tmp_path, tmp_path, end, command, stages)
        for file in ("rows.jsonl", "sections.jsonl"):
            found = [row["section"] for row in start.lines_of(tmp_path / file)]
            assert sorted(found) == ["first", "second"]
    assert (tmp_path / "table.md").read_text().count("| second | row | ms 1.5 |") == 1


def test_each_task_has_a_process_of_its_own(tmp_path, monkeypatch):
    options, tasks = {}, []

    class Pool:
        def __init__(self, *_, **given):
            options.update(given)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, *task):
            tasks.append(task)
            return SimpleNamespace(result=list)

    monkeypatch.setattr(kernels, "ProcessPoolExecutor", Pool)
    kernels.run(Rows("kernels", tmp_path), CPU)
    assert len(tasks) > len(kernels.PARTS)
    assert options["max_tasks_per_child"] == 1, "an error of the device stays with its process"


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


def test_rows_that_need_what_is_missing_are_shown_as_not_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenloom.engine_core.core", None)
    rows = Rows("tokens", tmp_path)
    assert not tokens._with_core(rows, CPU, {}, "float32", "async")
    start.write_table(tmp_path)
    assert "| tokens | tokens, float32, async | **not run**: import of" in (tmp_path / "table.md").read_text()
    assert start.not_run(tmp_path) == ["tokens, float32, async", *start.DEADLINES]


def test_features(tmp_path):
    rows = Rows("features", tmp_path)
    features.run(rows, CPU)
    by_name = {row["name"]: row for row in found(rows)}
    assert len(by_name) == len(features.CHECKS) + 3  # two quantized checkpoints, twice, and two libraries of attention
    assert by_name.pop("NCCL")["not_run"] == "NCCL moves memory of GPUs"
    assert by_name["adapters, float32"]["changed"] == 1
    assert by_name["drafts, float32"]["accepted"] > 0
    assert by_name["layers that keep a state, float32"]["found_in_cache"] > 0
    assert by_name["sleep and wake, 2 levels"]["megabytes_freed"] > 0
    assert all(row.get("different", 0) == 0 for name, row in by_name.items() if "quantized" not in name)


def test_a_feature_that_fails_is_a_row_and_hides_no_other(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(features, "CHECKS", {"fails": fail, "works": lambda rows, *_: not rows.add("works", ms=1.0)})
    rows = Rows("features", tmp_path)
    with pytest.raises(SystemExit, match=r"wrong: fails$"):
        features.run(rows, CPU)
    assert [row.get("error", "") for row in found(rows)] == ["RuntimeError: no such kernel", ""]


def test_prefill_and_decode_in_two_processes(tmp_path):
    rows = Rows("pair", tmp_path)
    pair.run(rows, CPU)
    (row,) = found(rows)
    assert row["name"] == "prefill and decode, shm"
    assert (row["requests"], row["different"]) == (4, 0)
    assert row["blocks_moved"] > 0


def test_the_rehearsal_has_the_versions_of_the_lower_bounds():
    bounds = dict(re.findall(r'"(torch|triton)>=([\d.]+)', (start.ROOT / "pyproject.toml").read_text()))
    assert {f"{name}=={version}.*" for name, version in bounds.items()} <= set(rehearsal.PACKAGES)
    (version,) = re.findall(r"^TRITON_VERSION := (\S+)$", (start.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert version.startswith(f"{bounds['triton']}.")
    assert "\nmake test-triton " in (start.ROOT / ".ci/run").read_text()
    assert all((start.ROOT / path).is_dir() for path in rehearsal.TESTS)


def test_what_takes_turns_does_not_fit_into_the_cache():
    l2 = 50 << 20
    for nbytes in (2 << 20, 8 << 20, 49 << 20, 51 << 20, 1 << 30):
        assert target.turns(nbytes, l2) * nbytes >= 4 * l2
        assert (target.turns(nbytes, l2) - 1) * nbytes < 4 * l2, "and is no larger than that"


def test_each_call_reads_all_that_takes_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "turns", lambda self, nbytes: 3)
    read = []
    monkeypatch.setattr(Target, "graph_ms", lambda self, run, calls: read.append(len(run())) or 3.0)
    rows = Rows("speeds", tmp_path)
    speeds._product(rows, CPU, 20, 64, 32)
    monkeypatch.setattr(sampler_speeds, "draw", lambda logits, columns, divides: logits)
    sampler_speeds._draw(rows, CPU, 0, 1.0)
    assert read == [3, 3]
    assert found(rows)[0]["us"] == 1000.0


def test_the_references_are_small_and_long_enough():
    texts = json.loads(tokens.REFERENCES.read_text())["logprobs"]
    assert sum(map(len, texts)) >= 2000
    assert tokens.REFERENCES.stat().st_size <= 1 << 20


def test_the_steps_of_a_model(tmp_path):
    rows = Rows("model", tmp_path)
    rows.add(ceilings.READ, gb_per_s=1.0)
    model.run(rows, CPU)
    names = [row["name"] for row in found(rows)]
    assert names[2:] == [
        *(f"8B, {count} decodes of {length}" for length in (16, 40) for count in (1, 3)),
        "8B, prefill of 128",
        "8B, 2 decodes of 8, scheduled ahead",
    ]
    assert all(row["ms"] > 0 for row in found(rows)[2:])
    assert found(rows)[2]["share_of_ceiling"] > 0


def test_kv_between_two_processes(tmp_path):
    rows = Rows("kv", tmp_path)
    kv.run(rows, CPU)
    by_name = {row["name"]: row for row in found(rows)}
    assert by_name["KV, cuda"]["not_run"] == "the owner could not serve it"  # there is no driver
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
