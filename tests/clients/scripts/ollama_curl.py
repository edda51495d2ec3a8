"""curl, with the calls of Ollama's documentation as they stand there: no Content-Type, so curl sends that of a form."""

import json
import os
import subprocess

URL, MODEL = os.environ["TOKENLOOM_URL"], os.environ["TOKENLOOM_MODEL"]
SHORT = {"num_predict": 24, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
EVERY_OPTION = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100_000,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "mirostat": 1,
    "frequency_penalty": 1.0,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
    "penalize_newline": True,
    "num_ctx": 1024,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "low_vram": False,
    "vocab_only": False,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 8,
}
USER = {"role": "user", "content": "why is the sky blue?"}
WEATHER = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER}}


def curl(path: str, body: object = None, *options: str) -> list[dict[str, object]]:
    """The lines of the answer."""
    data = [] if body is None else ["-d", json.dumps(body, indent=2)]
    done = subprocess.run(["curl", "-sS", *options, f"{URL}{path}", *data], check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("error" not in line for line in lines), (path, body, lines)
    return lines


def check(lines: list[dict[str, object]], reason: str = "") -> None:
    *parts, last = lines
    assert last["done"], lines
    assert not any(part["done"] for part in parts), lines
    assert not reason or last["done_reason"] == reason, last
    if last["done_reason"] in ("load", "unload"):
        return
    names = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count")
    assert all(isinstance(last[name], int) for name in names), last
    assert 0 < last["eval_duration"] <= last["total_duration"], last  # type: ignore[operator]


def documentation() -> None:
    """Make each call."""
    prompt = {"model": MODEL, "prompt": "Why is the sky blue?", "options": SHORT}
    check(curl("/api/generate", prompt))
    check(curl("/api/generate", {**prompt, "stream": False}))
    check(curl("/api/generate", {**prompt, "model": f"{MODEL}:latest", "stream": False, "raw": True}))
    check(curl("/api/generate", {**prompt, "format": "json", "stream": False}))
    formed = {**prompt, "format": SCHEMA, "stream": False, "options": {"temperature": 0, "num_predict": 60}}
    check(curl("/api/generate", formed, "-X", "POST", "-H", "Content-Type: application/json"))
    check(curl("/api/generate", {**prompt, "stream": False, "options": EVERY_OPTION}))
    check(curl("/api/generate", {"model": MODEL}), "load")
    check(curl("/api/generate", {"model": MODEL, "keep_alive": 0}), "unload")
    chat = {"model": MODEL, "messages": [USER], "options": SHORT}
    check(curl("/api/chat", chat))
    check(curl("/api/chat", {**chat, "stream": False}))
    check(curl("/api/chat", {**chat, "messages": [USER, {"role": "assistant", "content": "It scatters."}, USER]}))
    check(curl("/api/chat", {**chat, "stream": False, "tools": [TOOL]}))
    check(curl("/api/chat", {"model": MODEL, "messages": []}), "load")
    check(curl("/api/chat", {"model": MODEL, "messages": [], "keep_alive": 0}), "unload")
    (listed,) = curl("/api/tags")[0]["models"]  # type: ignore[misc]
    (running,) = curl("/api/ps")[0]["models"]  # type: ignore[misc]
    assert listed["digest"] == running["digest"]
    assert listed["size"] > 1 << 16
    assert curl("/api/show", {"model": MODEL})[0]["capabilities"]
    assert curl("/api/pull", {"model": MODEL})[-1]["status"] == "success"
    assert curl("/api/version")[0]["version"]
