"""``tokenloom demo``: one command, an answer, a table, nothing left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tokenloom.model_files.model_path import DEMO_MODEL, PACKAGED

COMMAND = (sys.executable, "-m", "tokenloom.cli.main", "demo")

ENGINE_WENT_ON = re.compile(
    r"kill (\d+): engine-1 ended after \d+ of \d+ characters; engine-0 went on after \d+ ms, and the text is the same"
)


def run(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory), "COLUMNS": "120"}
    return subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, env=environment, check=False)


def test_it_answers_shows_the_times_and_leaves_nothing(socket_dir: Path) -> None:
    done = run(socket_dir, "What is a token?")
    assert done.returncode == 0, done.stderr
    assert "A token is a small piece of text" in done.stdout
    steps = re.findall(r"│ [\w ]+ │ ([\w ]+?) +│ +\d+\.\d │", done.stdout)
    assert steps == [
        "tokenize", "placement", "queue", "prefill", "KV transfer", "decode", "detokenize", "other", "total",
    ]  # fmt: skip
    assert "tokenloom-demo:json  {" in done.stdout
    assert "tokenloom-demo:pirate  Arr!" in done.stdout
    assert "engine-1 had computed" in done.stdout or ENGINE_WENT_ON.search(done.stdout), "the answer is a short one"
    assert list((socket_dir / "tokenloom").iterdir()) == []
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if any(str(socket_dir) in argument for argument in command)]


def test_an_answer_goes_on_with_the_same_text_when_its_engine_is_killed(socket_dir: Path) -> None:
    done = run(socket_dir, "--kills", "2")
    assert done.returncode == 0, done.stderr
    assert "[engine-1 is killed]" in done.stdout
    assert ENGINE_WENT_ON.findall(done.stdout) == ["1", "2"], "the second one after the engine has restarted"
    assert "2 kills during answers: 0 broken, 2 continued by another engine, 0 with another text" in done.stdout


def test_a_kept_demo_kills_an_engine_for_its_page_and_ends_in_order(socket_dir: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(socket_dir), "PYTHONUNBUFFERED": "1"}
    command = (*COMMAND, "--keep", "--kills", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as demo:
        assert demo.stdout is not None
        found = (re.search(r"the page at (http://[\w.:]+)/ has a button", line) for line in demo.stdout)
        url = next(match[1] for match in found if match)
        button = httpx.get(f"{url}/mesh").json()["kill_engine"]
        headers = {"origin": url, button["header"]: button["token"]}
        assert httpx.post(url + button["path"], headers=headers | {"origin": "http://evil.example"}).status_code == 403
        killed = httpx.post(url + button["path"], headers=headers)
        assert (killed.status_code, killed.json()) == (200, {"engine": "engine-1"}), "the one that decodes"
        again = httpx.post(url + button["path"], headers=headers)
        assert again.status_code == 503, "the other one has to go on with the answers"
        assert "1 of the engines serve now" in again.text
        demo.send_signal(signal.SIGINT)
        assert demo.wait() == 0


def test_a_picture_is_shown_and_described(socket_dir: Path) -> None:
    done = run(socket_dir, "--model", "tokenloom-picture")
    assert done.returncode == 0, done.stderr
    assert str(PACKAGED["tokenloom-picture"] / "example.png") in done.stdout.replace("\n", "")
    assert "There is a yellow star to the left of a blue circle." in done.stdout


def test_a_failure_shows_the_logs_and_ends_with_status_1(socket_dir: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(DEMO_MODEL, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    done = run(socket_dir, "--model", str(broken))
    assert done.returncode == 1
    assert "did not start" in done.stderr
    assert "ERROR" in done.stderr, "the parts' own words"
