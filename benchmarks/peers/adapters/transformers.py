"""Runs Hugging Face transformers: `generate` on one static batch. It has no prefix cache."""

import importlib
import time
from typing import Any

from ..workloads import Timing, Workload


class Transformers:
    """Options: `attn` (sdpa or eager)."""

    def __init__(self, model: str, threads: int, workloads: list[Workload], options: dict[str, str]) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", attn_implementation=options.get("attn", "sdpa")
        ).eval()
        self.version = f"transformers {transformers.__version__}, torch {self._torch.__version__}"

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        times: list[float] = []

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool)

        ids = self._torch.tensor(prompts)
        lengths = {"max_new_tokens": workload.output, "min_new_tokens": workload.output}
        with self._torch.inference_mode():
            started = time.perf_counter()
            output = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), do_sample=False, stopping_criteria=[note], **lengths
            )
            seconds = time.perf_counter() - started
        num_tokens = output.numel() - ids.numel()
        if workload.requests > 1:
            return Timing(seconds, num_tokens)
        return Timing(seconds, num_tokens, times[0] - started, times[-1] - times[0])

    def close(self) -> None:
        del self._model
