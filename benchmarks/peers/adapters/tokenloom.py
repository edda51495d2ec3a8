"""Runs Tokenloom's offline API."""

import importlib
import time
from pathlib import Path
from typing import Any

from ..workloads import LORA_RANK, Timing, Workload, adapter_paths


class Tokenloom:
    """Options: arguments of `LLM` whose values are numbers, and `dtype`."""

    def __init__(self, model: str, threads: int, workloads: list[Workload], options: dict[str, str]) -> None:
        self._tokenloom = importlib.import_module("tokenloom")
        importlib.import_module("torch").set_num_threads(threads)
        arguments: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in options.items()}
        if num_adapters := max(w.adapters for w in workloads):
            arguments |= {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": LORA_RANK}
        self._adapters = [self._tokenloom.LoRARequest(path, path) for path in adapter_paths(model, num_adapters)]
        self._llm = self._tokenloom.LLM(Path(model), **arguments)
        self.version = f"tokenloom {self._tokenloom.__version__}"

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        if workload.requests > 1:
            return self._generate(prompts, workload.output, workload.adapters)
        return self._stream(prompts[0], workload.output)

    def close(self) -> None:
        self._llm.close()

    def _stream(self, prompt: list[int], num_tokens: int) -> Timing:
        sampling = self._tokenloom.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        times = [
            (time.perf_counter() - started, len(output.outputs[0].token_ids))
            for output in self._llm.stream({"prompt_token_ids": prompt}, sampling)
        ]
        (first, _), (seconds, count) = times[0], times[-1]
        return Timing(seconds, count, first, seconds - first)

    def _generate(self, prompts: list[list[int]], num_tokens: int, num_adapters: int = 0) -> Timing:
        sampling = self._tokenloom.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        lora = [self._adapters[row % num_adapters] for row in range(len(prompts))] if num_adapters else None
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - started
        return Timing(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))
