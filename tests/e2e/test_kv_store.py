"""Engines that share a folder of KV blocks: what one computed, another loads, also after all of them were killed."""

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.test_disk_faults import SOON, until
from tests.mesh.harness import VOCAB_SIZE
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

PROMPT = [2 + number % 50 for number in range(200)]
NUM_BLOCKS = len(PROMPT) // 16


def ask(mesh: Any) -> int:
    """Check the tokens of the prompt; returns how many of its tokens were cached."""
    body = {"model": "tokenloom-demo", "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=SOON).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4, VOCAB_SIZE)
    cached: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return cached


def loaded(mesh: Any) -> float:
    """Bytes that its engines have loaded from the folder."""
    found = 0.0
    for address in (part["metrics"] for part in mesh.ps() if part["service"] == "engine"):
        lines = httpx.get(f"http://{address}/metrics").text.splitlines()
        wanted = [line for line in lines if line.startswith("tokenloom_kv_transfer_bytes_total") and '"folder"' in line]
        found += sum(float(line.split()[-1]) for line in wanted)
    return found


def test_prompts_outlive_the_engines_that_computed_them(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = ("--worker", "hash", "--engines", "2", "--kv-store", folder.as_uri(), "--kv-store-bytes", "64000000")
    mesh = serve(*options, TOKENLOOM_HASH_STEP_SECONDS="0")
    assert ask(mesh) == 0
    until(lambda: len(list(folder.glob("*.kv"))) >= NUM_BLOCKS)
    mesh.stop(signal.SIGKILL)
    mesh = serve(*options, TOKENLOOM_HASH_STEP_SECONDS="0")
    assert ask(mesh) == NUM_BLOCKS * 16
    assert loaded(mesh) > 0
