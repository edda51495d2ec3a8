"""A whole run: report, files."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.benchmarks.fake_server import ANSWER, FakeServer
from tokenloom.bench.load.arrivals import LoadResult, Pace
from tokenloom.bench.load.bodies import Backend
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.serve import ServeOptions, ServeRun, prompts_for, run_serve, with_vocabulary
from tokenloom.bench.mesh.serve_report import summarize, table
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

MIXED = DatasetOptions(DatasetName.MIXED, num_prompts=10, input_len=4, output_len=3, long_input_len=20)


async def run(server: FakeServer, options: ServeOptions) -> ServeRun:
    async with server.running():
        options = msgspec.structs.replace(options, base_url=server.base_url)
        return await run_serve(options, prompts_for(options))


def good(kind: str = "", ttft: float = 0.1, tokens: int = 3) -> Outcome:
    gap = 0.01
    itl = [gap] * (tokens - 1)
    return Outcome(0.0, kind, 4, tokens, ttft, ttft + sum(itl), itl)


def test_failures_count_in_nothing_but_themselves() -> None:
    failed = Outcome(0.0, error="HTTP 503", ttft=9.0, output_tokens=100, refused=True)
    report = summarize(LoadResult([good(), good(), failed], 2.0), Objectives({}))
    assert (report["completed"], report["failed"], report["errors"]) == (2, 1, ["HTTP 503"])
    assert report["refused"] == 1
    assert "1 of the failed requests were refused" in str(table(report, "").caption)
    assert (report["output_throughput"], report["request_throughput"], report["total_token_throughput"]) == (3, 1, 7)
    assert report["p99_ttft_ms"] == 100.0
    assert report["median_itl_ms"] == report["median_tpot_ms"] == 10.0
    assert "request_goodput" not in report


def test_goodput_is_of_those_that_met_the_objectives() -> None:
    outcomes = [good(ttft=0.1), good(ttft=0.2), good(ttft=0.3), Outcome(0.0, error="x")]
    report = summarize(LoadResult(outcomes, 2.0), Objectives({"ttft": 250.0}))
    assert (report["request_goodput"], report["goodput_share"]) == (1.0, 0.5)


def test_kinds_are_measured_apart() -> None:
    outcomes = [good("chat"), good("chat"), good("long", ttft=1.0)]
    report = summarize(LoadResult(outcomes, 1.0), Objectives({"ttft": 500.0}))
    assert report["kinds"]["chat"]["median_ttft_ms"] == 100.0
    assert report["kinds"]["long"]["median_ttft_ms"] == 1000.0
    assert report["kinds"]["long"]["request_goodput"] == 0.0


async def test_a_run_over_http(tmp_path: Path) -> None:
    server = FakeServer([ANSWER])
    options = ServeOptions("", "m", vocab_size=100, dataset=MIXED, pace=Pace(max_concurrency=4), num_warmups=2)
    served = await run(server, options)
    assert len(server.bodies) == 12  # two of them to warm up
    assert {body["ignore_eos"] for body in server.bodies} == {True}
    report = served.report
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (10, 0, 30)
    assert report["request_rate"] == "inf"
    assert set(report["kinds"]) == {"chat", "long"}
    assert report["machine"]["cores"] >= 1
    served.write_json(tmp_path / "run.json", detailed=True)
    assert len(json.loads((tmp_path / "run.json").read_text())["requests"]) == 10
    served.write_plot(tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().count("<polyline") == 4


async def test_a_chat_is_sent_as_text() -> None:
    server = FakeServer([ANSWER])
    options = ServeOptions("", DEMO_MODEL_NAME, Backend.OPENAI_CHAT, dataset=DatasetOptions(num_prompts=1))
    await run(server, options)
    (turn,) = server.bodies[0]["messages"]
    assert turn["role"] == "user"
    assert turn["content"]
    assert "/v1/chat/completions" in server.heads[0]


def test_the_table_has_a_row_for_each_measure_and_kind() -> None:
    report = summarize(LoadResult([good("chat"), good("long")], 1.0), Objectives({"ttft": 1.0}), (50, 99))
    shown = table(report, "title")
    assert shown.row_count == 12
    assert [column.header for column in shown.columns] == ["ms", "mean", "median", "p50", "p99"]


def test_without_a_tokenizer_or_a_vocabulary_nothing_starts() -> None:
    with pytest.raises(Exception, match="no such"):
        prompts_for(ServeOptions("", "./nowhere"))


def test_a_server_whose_tokenizer_is_not_at_hand_gets_ids_that_every_model_has() -> None:
    options, note = with_vocabulary(ServeOptions("", "nowhere", dataset=MIXED))
    assert "no tokenizer of 'nowhere' is at hand: prompts are random token ids below 1000" in note
    ids = [each for prompt in prompts_for(options) for each in prompt.token_ids]
    assert 100 < max(ids) < 1000
    for at_hand in (ServeOptions("", DEMO_MODEL_NAME), ServeOptions("", "nowhere", vocab_size=9)):
        assert with_vocabulary(at_hand) == (at_hand, "")
    for needed in (ServeOptions("", "nowhere", Backend.OPENAI_CHAT), ServeOptions("", "m", tokenizer="./nowhere")):
        with pytest.raises(ValueError, match="--tokenizer names a directory"):
            with_vocabulary(needed)
