"""The commands that ask a mesh and look after it, against one that serves the demo model."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMAND
from tests.tokenloom.cli.terminal import terminal

PREFILL = "Prefill is the first step of a request: the model reads the whole prompt at once and fills the KV cache."


@pytest.fixture
def mesh(default_mesh: Any) -> Any:
    return default_mesh()


def run(mesh: Any, *arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    """A command as a script runs it; which mesh is meant it finds out itself."""
    command = (*COMMAND, *arguments)
    return subprocess.run(command, input=given, capture_output=True, text=True, env=mesh.environment, check=False)


def batch(path: Path, ids: range, *more: dict[str, Any]) -> Path:
    lines = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tokenloom-demo",
                "messages": [{"role": "user", "content": "What is prefill?"}],
                "temperature": 0,
            },
        }
        for index in ids
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
    return path


def test_chat_in_a_script(mesh: Any) -> None:
    done = run(mesh, "chat", "--temperature", "0", given="What is prefill?\n")
    assert (done.returncode, done.stdout) == (0, PREFILL + "\n"), done.stderr
    answer = json.loads(run(mesh, "chat", "What is prefill?", "--temperature", "0", "--json").stdout)
    assert (answer["text"], answer["finish_reason"]) == (PREFILL, "stop")
    assert answer["usage"]["completion_tokens"] > 10


def test_an_engine_has_one_openmp_runtime_and_the_other_parts_none(mesh: Any) -> None:
    """A second one, which a repaired wheel would bring, has threads of its own that compete for the cores."""
    assert run(mesh, "chat", "What is prefill?", "--max-tokens", "4").returncode == 0
    runtimes: dict[int, set[str]] = {}
    for process in mesh.family():
        with contextlib.suppress(OSError):  # it has ended since
            columns = [line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
            names = {each[5].rpartition("/")[2] for each in columns if len(each) == 6}
            runtimes[process.pid] = {name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))}
    found = [names for names in runtimes.values() if names]
    assert found, "no process of the mesh computes"
    assert all(len(names) == 1 for names in found), runtimes


def test_chat_on_a_terminal(mesh: Any) -> None:
    with terminal("chat", "--temperature", "0", "--plain", environment=mesh.environment) as screen:
        screen.read_until("tokenloom-demo at http://127.0.0.1")
        screen.read_until("> ")
        screen.type("What is prefill?\n")
        assert PREFILL in screen.read_until("s in total")
        screen.read_until("> ")
        screen.type("/history\n")
        screen.read_until(f"assistant: {PREFILL}")
        screen.read_until("> ")
        screen.type("/exit\n")
        assert screen.end() == 0


def test_complete_and_models(mesh: Any) -> None:
    done = run(mesh, "complete", "Once upon a time", "--temperature", "0", "--max-tokens", "8", "--echo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    answer = json.loads(
        run(mesh, "complete", "Once upon a time", "--temperature", "0", "--max-tokens", "8", "--json").stdout
    )
    assert done.stdout == f"Once upon a time{answer['choices'][0]['text']}\n"
    assert [model["id"] for model in json.loads(run(mesh, "models", "--json").stdout)] == ["tokenloom-demo"]
    assert "tokenloom-demo" in run(mesh, "models").stdout
    assert "HTTP 404" in run(mesh, "complete", "Hi", "--model", "other").stderr


def test_a_batch_and_its_second_run(mesh: Any, tmp_path: Path) -> None:
    wrong = {"custom_id": "wrong", "url": "/v1/chat/completions", "body": {"model": "tokenloom-demo", "messages": 7}}
    source, target = batch(tmp_path / "in.jsonl", range(12), wrong), tmp_path / "out.jsonl"
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--concurrency", "4")
    done = run(mesh, *arguments)
    assert done.returncode == 1
    assert "1 of 13 requests failed" in done.stderr
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert set(answers) == {*(f"r{index}" for index in range(12)), "wrong"}
    assert answers.pop("wrong")["response"]["status_code"] == 400
    texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in answers.values()}
    assert texts == {PREFILL}
    before = target.read_bytes()
    assert run(mesh, *arguments).returncode == 0
    assert target.read_bytes() == before


def test_top_sees_what_the_mesh_did(mesh: Any) -> None:
    seen = json.loads(run(mesh, "top", "--json", "--interval", "0.2").stdout)
    services = [part["service"] for part in seen["parts"]]
    assert services == ["gateway", "output_processor", "engine", "tokenizer", "coordinator"]
    assert {part["health"] for part in seen["parts"]} == {"SERVING"}
    engine = seen["parts"][2]
    assert (engine["running"], engine["waiting"]) == (0, 0)
    assert 0 <= engine["kv_usage"] < 1
    assert engine["memory_bytes"] > 50e6
    assert engine["placement"] == {"rule": "score", "values": {"waiting": 0, "running": 0, "score": 0}}
    shown = run(mesh, "top", "--once", "--interval", "0.2").stdout
    assert "5 of 5 parts are serving" in shown
    assert "engine-0" in shown
    assert "placement by score" in shown
    rows = json.loads(run(mesh, "ps", "--json").stdout)
    assert [row["placement"] for row in rows if row["service"] == "coordinator"] == [{"rule": "score", "values": {}}]
    assert [row["placement"] for row in rows if row["service"] == "engine"] == [engine["placement"]]


def test_a_batch_that_brings_its_own_mesh(mesh: Any, tmp_path: Path) -> None:
    source, target = batch(tmp_path / "in.jsonl", range(2)), tmp_path / "out.jsonl"
    done = run(mesh, "run-batch", "-i", str(source), "-o", str(target), "--model", "tokenloom-demo")
    assert done.returncode == 0, done.stderr
    assert len(target.read_text().splitlines()) == 2


def test_a_killed_generate_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": index, "prompt": f"Story {index}:"} for index in range(120)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*COMMAND, "generate", str(source), str(target), "--max-tokens", "4", "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not target.exists() or target.stat().st_size < 500:
            assert first.poll() is None, "it ended too early to be killed"
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
    kept = target.read_text().rpartition("\n")[0]
    assert subprocess.run(command, check=False, stderr=subprocess.PIPE).returncode == 0
    assert target.read_text().startswith(kept)
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == list(range(120))
