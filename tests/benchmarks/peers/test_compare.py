"""Engines in processes of their own."""

import sys
from pathlib import Path

import pytest

from tokenloom.bench.peers.compare import PeerFailed, PeerOptions, num_runs, run_peers, tables, vocab_size, write_plot
from tokenloom.bench.peers.workloads import LORA_RANK, WORKLOADS, Workload, adapter_paths
from tokenloom.bench.random_adapter import write_adapter
from tokenloom.bench.random_model import write_model
from tokenloom.model_files.model_path import DEMO_MODEL


def test_prompts_share_what_they_should_and_nothing_between_seeds() -> None:
    workload = Workload("w", requests=4, shared=20, unique=5, output=1)
    prompts = workload.prompts(1000, seed=1)
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert prompts == workload.prompts(1000, seed=1)
    assert workload.prompts(1000, seed=2)[0][:2] != prompts[0][:2]


def test_workloads_go_by_their_names() -> None:
    assert {name: workload.name for name, workload in WORKLOADS.items()} == {name: name for name in WORKLOADS}


def test_tokenloom_answers_from_another_process() -> None:
    heard: list[tuple[str, str]] = []
    options = PeerOptions(DEMO_MODEL, {"tokenloom": sys.executable}, workloads=("single-stream",), repeats=1, threads=1)
    report = run_peers(options, lambda workload, engine: heard.append((workload, engine)))
    row = report["workloads"]["single-stream"]["tokenloom"]
    assert heard == [("single-stream", "tokenloom")] * num_runs(options)
    assert row["ttft_ms"]["median"] > 0
    assert row["decode_tokens_per_second"]["median"] > 0
    assert report["versions"]["tokenloom"].startswith("tokenloom ")
    assert [table.row_count for table in tables(report)] == [1]


def test_requests_of_a_workload_name_adapters(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_model("tiny-fp32", model)
    for seed, path in enumerate(adapter_paths(str(model), WORKLOADS["lora"].adapters)):
        write_adapter(Path(path), model, LORA_RANK, seed)
    options = PeerOptions(model, {"tokenloom": sys.executable}, workloads=("lora",), repeats=1, threads=1)
    report = run_peers(options, lambda *_: None)
    assert report["workloads"]["lora"]["tokenloom"]["output_tokens_per_second"]["median"] > 0
    Path(adapter_paths(str(model), 1)[0]).rename(tmp_path / "elsewhere")
    with pytest.raises(PeerFailed, match=r"tiny-lora/0.*No such file"):
        run_peers(options, lambda *_: None)


def test_an_engine_without_adapters_is_refused_by_name() -> None:
    options = PeerOptions(DEMO_MODEL, {"llamacpp": "python", "tokenloom": "python"}, workloads=("batch", "lora"))
    with pytest.raises(ValueError, match="workload lora runs on tokenloom and vllm only; leave out llamacpp"):
        run_peers(options, lambda *_: None)


def test_an_engine_that_ends_says_why(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    interpreter.chmod(0o755)
    with pytest.raises(PeerFailed, match=r"status 3\nno such engine"):
        run_peers(PeerOptions(DEMO_MODEL, {"vllm": str(interpreter)}), lambda *_: None)


def test_the_vocabulary_is_the_checkpoints() -> None:
    assert vocab_size(DEMO_MODEL) > 0


def test_the_plot_shows_every_engine(tmp_path: Path) -> None:
    speed = {"output_tokens_per_second": {"median": 2.0, "min": 1.0, "max": 3.0}}
    write_plot(tmp_path / "p.svg", {"model": "m", "workloads": {"batch": {"tokenloom": speed, "vllm": speed}}})
    text = (tmp_path / "p.svg").read_text()
    assert text.count('class="bar ') == 2
    assert "vllm" in text
