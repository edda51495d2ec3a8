"""A mesh of processes records its requests, and a command computes one again after the mesh has ended."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import COMMAND
from tokenloom.request.request_records import RecordedRequest, read_records


def replay(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    engine = ("--max-model-len", "256", "--num-kv-blocks", "64")
    command = (*COMMAND, "replay", *arguments, "--record-dir", str(folder), *engine)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_chat_of_yesterday_comes_again(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    arguments = ("--dtype", "float32", "--request-record-dir", str(folder), "--output-processors", "2")
    mesh = serve(*arguments, "--max-model-len", "256", "--num-kv-blocks", "64")
    body = {"messages": [{"role": "user", "content": "Who made the lamp?"}], "max_tokens": 12, "temperature": 0.9}
    answers = [httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60).json() for _ in range(4)]
    assert mesh.stop(signal.SIGTERM) == 0
    found = {each.id: each for each in read_records(folder) if isinstance(each, RecordedRequest)}
    assert len(found) == len(answers)
    one = answers[0]["id"]
    done = replay(one, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (each for each in found.values() if one.endswith(each.id))
    tokens = sum(len(output.token_ids) for output in record.outputs)
    assert done.stdout == f"{record.id}: equal (outputs: 1, tokens: {tokens})\n"
    assert record.prompt_text is None
    done = replay("--all", folder=folder)
    assert done.stdout.splitlines()[-1] == "equal requests: 4 of 4; damaged lines: 0"
