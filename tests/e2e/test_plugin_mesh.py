"""A mesh of processes with the example's plugins, prefill and decode apart, and the death of an engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.plugin_packages import EXAMPLE_NAME, pip_install_example
from tokenloom import LLM, SamplingParams

TOKEN, EVERY, LENGTH = 77, 4, 160
CHORUS = {"chorus_token_id": TOKEN, "chorus_every": EVERY}
PROMPT = list(range(300, 340))
KEY = {"authorization": "Bearer team-a.x1y2"}
BODY = {
    "model": "tokenloom-demo",
    "prompt": PROMPT,
    "max_tokens": LENGTH,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
    "vllm_xargs": CHORUS,
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packages")
    pip_install_example(directory, tmp_path_factory.mktemp("source") / "plugin")
    return directory


@pytest.fixture(scope="module")
def mesh(serve: Any, packages: Path) -> Any:
    named = {
        "scheduling-policy": "shortest_first",
        "placement": "fewest",
        "device": "host",
        "distributed-executor-backend": "in_process",
        "kv-transports": "memory",
        "kv-connector": "shelf",
        "authentication": "team",
        "fronts": "tgi",
    }
    flags = [f"--{option}={EXAMPLE_NAME}:{name}" for option, name in named.items()]
    return serve(
        *("--plugins", EXAMPLE_NAME, "--prefill", "1", "--decode", "2", "--dtype", "float32", "--pd-threshold", "0"),
        *flags,
        PYTHONPATH=str(packages),
    )


@pytest.fixture(scope="module")
def expected(packages: Path) -> list[int]:
    """The tokens of one engine alone, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        llm = LLM("tokenloom-demo", dtype="float32", plugins=[EXAMPLE_NAME], num_gpu_blocks_override=64)
        params = SamplingParams(max_tokens=LENGTH, seed=5, ignore_eos=True, extra_args=CHORUS)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        llm.close()
    return list(output.outputs[0].token_ids)


def stream(url: str, on_token: Callable[[int], object] = lambda count: None) -> list[int]:
    """The tokens of a stream; ``on_token`` gets how many there are."""
    tokens: list[int] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, headers=KEY, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                on_token(len(tokens))
    return tokens


def test_tokens_are_those_of_one_engine(mesh: Any, expected: list[int]) -> None:
    assert expected[EVERY - 1 :: EVERY] == [TOKEN] * (LENGTH // EVERY)
    assert stream(mesh.url) == expected


def test_tokens_go_on_on_another_engine(mesh: Any, expected: list[int]) -> None:
    def busy() -> psutil.Process:
        rows = {row["index"]: row for row in mesh.ps() if row["service"] == "engine" and row["role"] == "decode"}
        running = {index: row["placement"]["values"]["running"] for index, row in rows.items()}
        return psutil.Process(rows[max(running, key=lambda index: running[index])]["pid"])

    killed: list[psutil.Process] = []

    def kill(count: int) -> None:
        if count >= 12 and not killed:
            killed.append(busy())
            killed[0].kill()

    assert stream(mesh.url, kill) == expected
    assert killed, "the stream ended before"


def test_each_part_shows_what_it_may_load(mesh: Any) -> None:
    info = httpx.get(f"{mesh.url}/server_info", headers=KEY).json()
    assert [each.split()[:2] for each in info["plugins"]] == [[EXAMPLE_NAME, "0.1.0"]]
    assert all(engine["plugins"] for engine in info["engines"])
    shown = {row["service"]: bool(row["plugins"]) for row in mesh.ps()}
    assert shown == {
        "gateway": True,
        "tokenizer": True,
        "output_processor": False,
        "engine": True,
        "coordinator": True,
    }


def test_a_front_answers(mesh: Any) -> None:
    answer = httpx.post(f"{mesh.url}/generate", json={"inputs": "Hello", "max_new_tokens": 4}, headers=KEY, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["generated_text"]
    assert httpx.post(f"{mesh.url}/generate", json={"inputs": "Hello"}).status_code == 401


def test_a_key_that_nobody_has_is_refused(mesh: Any) -> None:
    for key, status in (("team-a.x1y2", 200), ("team-b.x1y2", 200), ("team-a.zzzz", 401), ("other.x1y2", 401)):
        body = {**BODY, "max_tokens": 1}
        answer = httpx.post(f"{mesh.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status, answer.text


def test_wrong_arguments_are_refused_at_the_gateway(mesh: Any) -> None:
    answer = httpx.post(f"{mesh.url}/v1/completions", json={**BODY, "vllm_xargs": {"other": 1}}, headers=KEY)
    assert answer.status_code == 400
    assert "no plugin of the engines reads 'other'" in answer.json()["error"]["message"]
