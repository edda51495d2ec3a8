"""Runs the CPU build of vLLM's V1 engine."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

from ..workloads import LORA_RANK, Timing, Workload, adapter_paths


class VLLM:
    """Options: `eager=1` (no compilation); read before the start: `bind` (cores of its OpenMP threads), `kv_gib`,
    `preload` (libraries that its guide recommends, separated by colons)."""

    def __init__(self, model: str, threads: int, workloads: list[Workload], options: dict[str, str]) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        lora: dict[str, Any] = {}
        if num_adapters := max(w.adapters for w in workloads):
            lora = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": LORA_RANK}
        self._adapters = [
            importlib.import_module("vllm.lora.request").LoRARequest(path, number, path)
            for number, path in enumerate(adapter_paths(model, num_adapters), 1)  # 0 means none
        ]
        self._llm = self._vllm.LLM(
            model=model,
            max_model_len=max(2048, *(w.prompt_len + w.output for w in workloads)),
            dtype=_checkpoint_dtype(model),  # vLLM's default turns fp32 into bf16
            max_num_seqs=64,
            enable_prefix_caching=True,
            enforce_eager=options.get("eager") == "1",
            **lora,
        )
        self._count = 0
        self.version = f"vllm {self._vllm.__version__}"

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=workload.output, ignore_eos=True)
        if workload.requests == 1:
            return self._stream(prompts[0], sampling)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        num = workload.adapters
        lora = [self._adapters[row % num] for row in range(len(prompts))] if num else None
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - started
        return Timing(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))

    def close(self) -> None:
        del self._llm

    def _stream(self, prompt: list[int], sampling: Any) -> Timing:
        engine, times, num_tokens = self._llm.llm_engine, [], 0
        self._count += 1
        started = time.perf_counter()
        engine.add_request(f"stream-{self._count}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                num_tokens = len(output.outputs[0].token_ids)
                times.append(time.perf_counter())
        return Timing(times[-1] - started, num_tokens, times[0] - started, times[-1] - times[0])


def _checkpoint_dtype(model: str) -> str:
    config = json.loads((Path(model) / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")
