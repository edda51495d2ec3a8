"""Two servers side by side, with whatever serves HTTP."""

import sys
from pathlib import Path

import pytest

from tokenloom.bench.load.arrivals import Pace
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.contenders import Contender, ServerBroke, compare, serve_command
from tokenloom.bench.mesh.disaggregated import report, table, write_plot
from tokenloom.bench.mesh.serve import ServeOptions
from tokenloom.supervisor.ports import reserved_ports

DATASET = DatasetOptions(
    DatasetName.MIXED, num_prompts=6, input_len=4, output_len=3, long_share=0.5, long_input_len=40, long_output_len=2
)
OPTIONS = ServeOptions(
    "", "fake", vocab_size=90, dataset=DATASET, pace=Pace(max_concurrency=2), objectives=Objectives({"ttft": 1e6})
)


async def test_both_get_the_same_load_in_turns(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    heard: list[str] = []
    flags = ("--served-model-name", "fake", "--worker", "hash", "--drain-timeout", "2")

    def on_round(name: str, count: int) -> "list[Outcome]":
        heard.append(name)
        return []

    with reserved_ports("127.0.0.1", 2, 0, 0) as ports:
        contenders = [
            Contender(
                name,
                serve_command("tokenloom-demo", port.http, "--grpc-port", str(port.grpc), *flags),
                f"http://127.0.0.1:{port.http}",
            )
            for name, port in zip(("a", "b"), ports, strict=True)
        ]
        results = await compare(contenders, OPTIONS, 2, lambda name, count: on_round(name, count).append)
    assert heard == ["a", "b", "b", "a"]
    findings = report(results, OPTIONS)
    for name in ("a", "b"):
        contender = findings["contenders"][name]
        assert (contender["completed"], contender["failed"], contender["total_output_tokens"]) == (12, 0, 30)
        assert contender["goodput_share"] == 1.0
        assert set(contender["kinds"]) == {"chat", "long"}
    assert [column.header for column in table(findings).columns] == ["", "a", "b"]
    write_plot(tmp_path / "plot.svg", results)
    assert (tmp_path / "plot.svg").read_text().count("<polyline") == 8


async def test_a_server_that_ends_says_why() -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    with pytest.raises(ServerBroke, match=r"a ended with status 1\nno such model"):
        await compare([Contender("a", command, "http://127.0.0.1:1")], OPTIONS, 1, lambda *_: lambda _: None)
