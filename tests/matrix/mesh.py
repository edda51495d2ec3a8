"""Starts ``tokenloom serve`` with the features of a cell, asks it, and looks at what it shows."""

import atexit
import base64
import functools
import io
import os
import re
import signal
import subprocess
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import psutil
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save

from tests.checkpoints.vision_prompts import picture
from tests.e2e.conftest import Served, command_of
from tokenloom.v1.coordinator_pb2 import WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

from .features import FEATURES, Seen, Task
from .model_files import Files, ModelFiles

LENGTHS = (3, 17, 40, 64, 65, 90)
NUM_TOKENS = 16
ADAPTER = "adapter"
PATTERN = r"(red|green) [0-9]{4,6}(, [a-z]{2,6})+"
_KEY = "key-of-the-matrix"
_PLAIN = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "m")
_SECONDS = 120.0
Answers = list[Any]
"""For each prompt the ids of the output, or its vector."""


class Refused(Exception):
    """The mesh, or a request, was refused for the reason that the text gives."""


def prompts() -> list[list[int]]:
    """Return prompts whose parts repeat, so that drafts are found, and of which two begin alike."""
    made = [[5 + (index * 7 + position % 9 * 31) % 480 for position in range(n)] for index, n in enumerate(LENGTHS)]
    return [*made, made[-1][:64] + made[0]]


class Mesh:
    """A mesh with some features."""

    def __init__(
        self, names: Sequence[str], files: ModelFiles, directory: Path, *, plain: Sequence[str] | None = None
    ) -> None:
        """``plain``: serve as floats the weights that the model of these features has; None: serve that of ``names``,
        as it is stored. Raises :class:`Refused`."""
        features = [FEATURES[name] for name in names]
        models = features if plain is None else [FEATURES[name] for name in plain]
        self._bases = frozenset(each.base for each in models) - {"dense"}
        found: Files = files.of(self._bases, next((each.stored for each in models if each.stored), ""))
        self.names = names
        self._model = found.model if plain is None else found.plain
        self._rows = found.plain if "prompt embeddings" in names else None
        directory.mkdir()
        self._more = {"RAY_ADDRESS": ray_address()} if "Ray" in names else {}
        flags = [flag for each in features for flag in each.flags]
        if "LoRA" in names:
            flags += ["--lora-modules", f"{ADAPTER}={files.adapter(self._bases)}"]
        flags = _with_drafts(
            [flag.replace("OFFLOAD", str(directory / "offload")) for flag in flags], files, self._bases
        )
        if "--data-parallel-size" in flags and "--prefill" in flags:  # a group of each role
            for role in ("--prefill", "--decode"):
                flags[flags.index(role) + 1] = "2"
        if {"sleep", "reload"} & set(names):
            flags += ["--admin-api-key", _KEY]
        if "--num-kv-blocks" not in flags and not self._encodes:
            flags += ["--num-kv-blocks", "400"]
        if not self._encodes:
            # Modules of transformers compute prompts of states in whole chunks of 64 tokens, beside a token of each.
            budget = "128" if "transformers' modules" in names and "states" in self._bases else "64"
            flags += ["--max-model-len", "256", "--max-num-batched-tokens", budget, "--max-num-seqs", "8"]
        self._directory = directory
        arguments = (str(self._model), "--device", "cpu", *_PLAIN, *flags)
        self._served = self._start(arguments)

    @property
    def _encodes(self) -> bool:
        return "encoder" in self._bases

    def _start(self, arguments: tuple[str, ...]) -> Served:
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self._directory), "HF_HUB_OFFLINE": "1"} | self._more
        (self._directory / "offload").mkdir()
        served = Served(self._directory, arguments, environment)
        if served.url:
            return served
        try:
            status = served.process.wait(30)
        finally:
            served.process.kill()
        text = served.log.read_text()
        if status == 2 or "(exited with status 2)" in text:  # of the command, or of an engine that it has started
            raise Refused(_reason(text))
        raise RuntimeError(f"exit status {status}:\n{text[-1200:]}")

    def close(self) -> None:
        if self._served.process.poll() is None:
            try:
                self._served.stop(signal.SIGINT)
            except subprocess.TimeoutExpired:
                for process in self._served.family():
                    process.kill()

    def answers(self, task: Task) -> tuple[Answers, Seen]:
        """Ask for all prompts at once, twice: the second time from the prefix cache, and after what the mesh's
        features do in between. Raises :class:`Refused` and, for other statuses and for two rounds that differ,
        ``AssertionError``."""
        first = self._round(task)
        self._between(task)
        second = self._round(task)
        assert all(map(equal, first, second)), f"the second time the answers differ: {first} and {second}"
        return first, self._seen()

    def _between(self, task: Task) -> None:
        if "sleep" in self.names:
            self._admin("/sleep?level=1")
            self._admin("/wake_up")
        if "reload" in self.names:
            self._admin(f"/reload_weights?path={self._model}")
        if "offload" not in self.names:
            return
        if "sleep" in self.names:  # which forgets all KV, that of the file too
            self._round(task)
        most = 200 if "images" in self._bases else 480
        for index in range(8):  # other prompts drive those of the rounds out of the cache
            prompt = [(index * 97 + position * 13) % most + 5 for position in range(200)]
            if task == "vectors":
                self._vector(prompt)
            else:
                self._post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})

    def _admin(self, path: str) -> None:
        answer = httpx.post(self._served.url + path, headers={"Authorization": f"Bearer {_KEY}"}, timeout=_SECONDS)
        if answer.status_code in (400, 501):
            raise Refused(answer.text)
        assert answer.status_code in (200, 202), answer.text

    def _round(self, task: Task) -> Answers:
        ask = self._vector if task == "vectors" else self._tokens
        with ThreadPoolExecutor(len(LENGTHS) + 1) as pool:
            return list(pool.map(ask, self._prompts()))

    def _prompts(self) -> list[list[int]]:
        return [[each % 200 for each in prompt[:60]] if self._encodes else prompt for prompt in prompts()]

    def _vector(self, prompt: list[int]) -> npt.NDArray[np.float64]:
        answer = self._post("/v1/embeddings", {"model": self._name(), "input": prompt})
        return np.array(answer["data"][0]["embedding"])

    def _tokens(self, prompt: list[int]) -> list[int]:
        body: dict[str, Any] = {"model": self._name(), "temperature": 0, "max_tokens": NUM_TOKENS}
        body |= {"return_token_ids": True}
        if "structured output" in self.names:
            body["structured_outputs"] = {"regex": PATTERN}
        else:
            body["ignore_eos"] = True
        if "images" in self.names:
            return self._shown(body, len(prompt))
        body |= {"prompt_embeds": self._embeds(prompt)} if self._rows is not None else {"prompt": prompt}
        ids: list[int] = self._post("/v1/completions", body)["choices"][0]["token_ids"]
        return ids

    def _shown(self, body: dict[str, Any], seed: int) -> list[int]:
        data = io.BytesIO()
        picture(90, 60 + seed % 40, seed).save(data, "PNG")
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"What is this? {seed}"}]
        answer = self._post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": parts}]})
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def _embeds(self, prompt: list[int]) -> str:
        assert self._rows is not None
        weights = load_file(self._rows / "model.safetensors")
        table = next(value for name, value in weights.items() if name.endswith("embed_tokens.weight"))
        return base64.b64encode(save({"prompt_embeds": np.ascontiguousarray(table[prompt])})).decode()

    def _name(self) -> str:
        return ADAPTER if "LoRA" in self.names else "m"

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(self._served.url + path, json=body, timeout=_SECONDS)
        if answer.status_code in (400, 501):
            raise Refused(answer.json()["error"]["message"])
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def _seen(self) -> Seen:
        totals: dict[str, float] = {}
        busy = 0
        for part in self._served.ps():
            if part["service"] != "engine":
                continue
            text = httpx.get(f"http://{part['metrics']}/metrics", timeout=_SECONDS).text
            own: dict[str, float] = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    own[sample.name] = own.get(sample.name, 0.0) + sample.value
                    for label, value in sample.labels.items():
                        own[f'{sample.name}{{{label}="{value}"}}'] = sample.value
            busy += own.get("vllm:generation_tokens_total", 0) + own.get("vllm:prompt_tokens_total", 0) > 0
            for name in own:
                totals[name] = totals.get(name, 0.0) + own[name]
        commands = [" ".join(command_of(each)) for each in self._served.family()]
        if "Ray" in self.names:  # its workers are children of its own processes
            commands += [" ".join(command_of(each)) for each in psutil.process_iter() if "ray::" in each.name()]
        return Seen(totals, commands, busy, self._computed(), is_other_than_without=False)

    def _computed(self) -> list[str]:
        address = next(part["address"] for part in self._served.ps() if part["service"] == "coordinator")
        with grpc.insecure_channel(address) as channel:
            snapshot = next(CoordinatorStub(channel).Watch(WatchRequest(), timeout=_SECONDS))
        prints = [entry.identity.fingerprint for entry in snapshot.engines]
        return [f"/{each.numerics}/ /{each.kv_layout}/" for each in prints]


@functools.cache
def ray_address() -> str:
    """Return the address of a Ray cluster of this process, which ends with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    atexit.register(nodes.shutdown)
    address: str = nodes.address
    return address


def equal(one: Any, other: Any) -> bool:
    """Return whether two answers are the same: tokens, or vectors up to the order of sums."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.allclose(one, other, atol=2e-4))
    return bool(one == other)


def _with_drafts(flags: list[str], files: ModelFiles, bases: frozenset[str]) -> list[str]:
    """Return the flags with the paths of what drafts for the model of these bases."""
    made = {"DRAFT": files.draft, "EAGLE": files.eagle}
    for name, of in made.items():
        if any(name in flag for flag in flags):
            flags = [flag.replace(name, str(of(bases))) for flag in flags]
    return flags


def _reason(text: str) -> str:
    """Return the sentence of a refusal in what the command has printed."""
    found = re.findall(r"ERROR engine-\d+ \S+ (.*)", text)
    found = found or re.findall(r"^Error: (.*(?:\n(?!\S*Error|Traceback).+)*)", text, re.MULTILINE)
    reason = " ".join(found[-1].split()) if found else text.strip()[-300:]
    return re.sub(r"/tmp/\S*/", "", reason)
