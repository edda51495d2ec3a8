"""The example of a policy gradient: the reward rises, over each way by which weights get to engines."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.mesh.harness import Mesh
from tokenloom import AsyncLLM, EngineArgs

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.policy_gradient import InProcess, OfMesh, Sampler, save_start, train


@asynccontextmanager
async def sampler_of(way: str, start: Path, directory: Path) -> AsyncIterator[Sampler]:
    if way != "stream":
        async with AsyncLLM(EngineArgs(str(start), dtype="float32", engine_process=False)) as llm:
            yield InProcess(llm, start, directory if way == "file" else None)
        return
    engine = {"worker": "model", "model": str(start), "dtype": "float32", "served_model_name": "tokenloom-demo"}
    engine["staged_weights_dir"] = str(directory / "staged")
    mesh = Mesh(directory, engines=2, engine=engine, gateway={"admin_api_key": ("root",)})
    async with mesh.running(), mesh.http() as http:
        yield OfMesh(http, mesh.coordinator.settings.listen, "root")


@pytest.mark.parametrize("way", ["memory", "file", "stream"])
async def test_the_reward_rises(way: str, tmp_path: Path, socket_dir: Path) -> None:
    policy, start = save_start(tmp_path / "start")
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    async with sampler_of(way, start, socket_dir if way == "stream" else tmp_path) as sampler:
        report = await train(sampler, policy, tokenizer, steps=6)
    assert len({step.version for step in report}) == len(report), "each step samples from the weights of the one before"
    assert all("+" not in step.version for step in report)
    assert max(step.ratio_error for step in report) < 1e-3
    assert report[-1].reward > report[0].reward + 0.1
