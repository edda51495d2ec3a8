"""Train the demo model to use the letter "e" often: sample from an engine, learn from the samples, give it the weights.

The engine draws the samples and says with which probability it drew each token; this program computes the same
probabilities with torch, and the gradient of the reward. After each step the engine gets the new weights:

    python examples/policy_gradient.py                  # as tensors, in shared memory
    python examples/policy_gradient.py --way file       # as a checkpoint
    python examples/policy_gradient.py --way stream --url http://127.0.0.1:8000 --coordinator ADDRESS --admin-key KEY

The last one samples from a running mesh, `tokenloom serve --model FOLDER --dtype float32 --staged-weights-dir
/dev/shm/rl --admin-api-key KEY`, and streams the tensors to each of its engines. FOLDER is what --save-start FOLDER
writes: the demo model in float32, because ratios of probabilities are only as exact as the weights.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tokenloom import AsyncLLM, EngineArgs, Logprob, SamplingParams, send_weights
from tokenloom.model_files.model_path import DEMO_MODEL

PROMPTS = ("Once upon a time", "Mia has a red ball.", "The little dog", "One day, Tom")
LETTER = "e"


@dataclass(frozen=True)
class Sample:
    """Holds a continuation as the engine drew it: its log probabilities, and the version of the weights that did."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: str


class Sampler(Protocol):
    """Draws samples, and takes new weights."""

    async def sample(self, prompt: list[int], count: int, length: int, seed: int) -> list[Sample]: ...

    async def update(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass
class InProcess:
    """Samples from an engine of this program. ``folder``: where checkpoints are written; None: the engine gets the
    tensors."""

    llm: AsyncLLM
    start: Path
    folder: Path | None = None

    async def sample(self, prompt: list[int], count: int, length: int, seed: int) -> list[Sample]:
        # Plain sampling: the policy is the model's own distribution.
        params = SamplingParams(
            n=count, max_tokens=length, temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True, logprobs=0, seed=seed
        )
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params):
            last = output
        (version,) = last.weights_versions
        return [
            Sample(prompt, each.token_ids, _drawn(each.token_ids, each.logprobs or []), str(version))
            for each in last.outputs
        ]

    async def update(self, tensors: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            await self.llm.update_weights(tensors, mode="wait")
            return
        path = write_checkpoint(self.folder / "next", self.start, tensors)
        await self.llm.pause_generation(mode="wait")
        await self.llm.reload_weights(path)
        await self.llm.resume_generation()


def _drawn(tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> list[float]:
    return [each[token].logprob for token, each in zip(tokens, logprobs, strict=True)]


@dataclass
class OfMesh:
    """Samples from a mesh over HTTP. Its engines take the tensors over gRPC, each of them before any loads them."""

    http: httpx.AsyncClient
    coordinator: str
    admin_key: str

    async def sample(self, prompt: list[int], count: int, length: int, seed: int) -> list[Sample]:
        body = {"prompt": prompt, "n": count, "max_tokens": length, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        asked = {"ignore_eos": True, "logprobs": 0, "return_token_ids": True, "seed": seed}
        model = (await self.http.get("/v1/models")).json()["data"][0]["id"]
        response = await self.http.post("/v1/completions", json={"model": model, **body, **asked})
        response.raise_for_status()
        return [
            Sample(prompt, each["token_ids"], each["logprobs"]["token_logprobs"], each["weights_version"])
            for each in response.json()["choices"]
        ]

    async def update(self, tensors: Mapping[str, Tensor]) -> None:
        path = await send_weights(tensors, self.coordinator)  # of a mesh with certificates: certificates=FOLDER
        headers = {"authorization": f"Bearer {self.admin_key}"}
        loaded = await self.http.post("/reload_weights", params={"path": path, "mode": "wait"}, headers=headers)
        loaded.raise_for_status()


def write_checkpoint(path: Path, like: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write tensors as a checkpoint, with the other files of the checkpoint ``like``."""

    def old_weights(folder: str, names: list[str]) -> set[str]:
        return {"model.safetensors"} if Path(folder) == like else set()

    if path != like:
        shutil.copytree(like, path, ignore=old_weights, dirs_exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "part")
    (path / "part").replace(path / "model.safetensors")  # the engine may have the old file mapped
    return path


def save_start(path: Path) -> tuple[PreTrainedModel, Path]:
    """Write the demo model in float32, and return it as what is trained."""
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    write_checkpoint(path, DEMO_MODEL, weights(policy))
    policy.config.save_pretrained(path)  # with its dtype
    return policy, path


def weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def logprobs_of(policy: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Return [samples, tokens]: the log probabilities of the samples' tokens, all of one length, with a gradient."""
    rows = [torch.tensor(each.prompt + each.tokens) for each in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = policy(ids, attention_mask=mask).logits.float().log_softmax(-1)
    drawn = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return torch.stack([drawn[index, len(each.prompt) - 1 :][: len(each.tokens)] for index, each in enumerate(samples)])


@dataclass(frozen=True)
class Step:
    """Reports one step: the mean reward of a token, how far the ratios of probabilities are from 1, and the version."""

    reward: float
    ratio_error: float
    version: str


async def train(
    sampler: Sampler, policy: PreTrainedModel, tokenizer: Tokenizer, *, steps: int, count: int = 8, length: int = 16
) -> list[Step]:
    """Take steps of the policy gradient, each from ``count`` samples of every prompt."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-4)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    rewards_of = torch.tensor([float(LETTER in text) for text in texts])
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    report = []
    for number in range(steps):
        drawn = await asyncio.gather(*(sampler.sample(prompt, count, length, number) for prompt in prompts))
        samples = [sample for group in drawn for sample in group]
        (version,) = {sample.version for sample in samples}
        rewards = rewards_of[torch.tensor([sample.tokens for sample in samples])]
        logprobs = logprobs_of(policy, samples)
        # 1 where the samples are of the policy that learns from them; an engine that lags would show here.
        ratios = (logprobs - torch.tensor([sample.logprobs for sample in samples])).exp()
        loss = -(ratios * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        await sampler.update(weights(policy))
        report.append(Step(float(rewards.mean()), float((ratios.detach() - 1).abs().max()), version))
        print(f"step {number}: {report[-1].reward:.3f} of the tokens have the letter, weights {version}", flush=True)
    return report


async def run(options: argparse.Namespace, folder: Path) -> list[Step]:
    policy, start = save_start(folder / "start")
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    if options.way == "stream":
        async with httpx.AsyncClient(base_url=options.url, timeout=60) as http:
            sampler = OfMesh(http, options.coordinator, options.admin_key)
            return await train(sampler, policy, tokenizer, steps=options.steps)
    async with AsyncLLM(EngineArgs(str(start), dtype="float32")) as llm:
        own = InProcess(llm, start, folder if options.way == "file" else None)
        return await train(own, policy, tokenizer, steps=options.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("memory", "file", "stream"), default="memory", help="how weights get there")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway, with --way stream")
    parser.add_argument("--coordinator", default="", help="its address, as `tokenloom ps` shows it")
    parser.add_argument("--admin-key", default="", help="the administrator's key of the mesh")
    parser.add_argument("--save-start", type=Path, help="only write the model that a mesh is to serve")
    options = parser.parse_args()
    if options.save_start is not None:
        save_start(options.save_start)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(options, Path(folder)))
    print(f"the reward rose from {report[0].reward:.3f} to {report[-1].reward:.3f}")


if __name__ == "__main__":
    main()
