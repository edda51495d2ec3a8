"""SMG's router in front of a mesh of ours, which it takes for an engine of vLLM's over gRPC."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import serving
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME

from .vllm_server import free_port

PATIENCE_SECONDS = 120.0
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 24, "temperature": 0}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def check_router(program: str, directory: Path) -> tuple[str, str]:
    """Return the version of the router and what was compared. Raises ``AssertionError`` for other answers than the
    mesh's own."""
    grpc_port, port = free_port(), free_port()
    with serving() as serve, open(directory / "smg.log", "ab") as log:
        served = serve("--worker", "hash", "--grpc-port", str(grpc_port))
        where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
        worker = ("--worker-urls", f"grpc://127.0.0.1:{grpc_port}", "--model-path", DEMO_MODEL_NAME)
        command = (program, "launch", *where, *worker, "--backend", "vllm", "--policy", "round_robin")
        # It reads the tokenizer from a folder with the name of the model, which is all that a mesh says of its place.
        (directory / DEMO_MODEL_NAME).symlink_to(DEMO_MODEL)
        router = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            with httpx.Client(timeout=60, trust_env=False) as http:
                url = f"http://127.0.0.1:{port}"
                _until_ready(http, url, router, directory / "smg.log")
                text = _compare(http, url, served.url)
        finally:
            router.terminate()
            router.wait()
    return _version(program), text


def _until_ready(http: httpx.Client, url: str, router: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and router.poll() is None:
        try:
            # It knows the model some time before it has loaded the tokenizer.
            if http.post(f"{url}/v1/chat/completions", json={"model": DEMO_MODEL_NAME, **CHAT}).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the router answers no chat: {log.read_text(errors='replace')[-1500:]}")


def _compare(http: httpx.Client, theirs: str, ours: str) -> str:
    compared = []
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for stream in (False, True):
            texts = [_text(http, url + path, body, stream=stream) for url in (theirs, ours)]
            # The router makes the text, and leaves out the bytes of a character that the end of the answer cuts off.
            texts = [text.rstrip("\ufffd") for text in texts]
            assert texts[0] == texts[1], f"{path}, stream {stream}: {texts[0]!r} instead of {texts[1]!r}"
            compared.append(f"{path}{' as a stream' if stream else ''}")
    return ", ".join(compared)


def _text(http: httpx.Client, url: str, body: dict[str, Any], *, stream: bool) -> str:
    response = http.post(url, json={"model": DEMO_MODEL_NAME, **body, "stream": stream})
    assert response.status_code == 200, f"{url}: {response.status_code}: {response.text[:300]}"
    lines = re.findall(r"^data: (\{.*\})$", response.text, re.MULTILINE) if stream else [response.text]
    events = [json.loads(line) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    assert choices, response.text[:300]
    parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


def _version(program: str) -> str:
    package = next((Path(program).parents[1] / "lib").glob("python*/site-packages/smg-*.dist-info"), None)
    return package.name.removeprefix("smg-").removesuffix(".dist-info") if package is not None else "unknown"
