"""Runs OpenVINO GenAI's continuous batching on the CPU. Reads ``MODEL-ov``, which ``optimum-cli export openvino``
writes."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

from ..workloads import Timing, Workload


class OpenVINO:
    """Options: `cache_gib`; `kv` (KV cache precision: u8, bf16, f16, f32); `precision` (of inference: bf16, f32; by
    default float32 for such a checkpoint, which OpenVINO would compute in bfloat16 where the processor can); `prime=1`
    (a shared prefix is computed before the others are added: it looks its cache up only then)."""

    def __init__(self, model: str, threads: int, workloads: list[Workload], options: dict[str, str]) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self._openvino: Any = importlib.import_module("openvino")
        self._genai: Any = importlib.import_module("openvino_genai")
        self._prime = options.get("prime") == "1"
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = int(options.get("cache_gib", "2"))
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if _is_float32(model):
            options = {"precision": "f32", **options}
        for option, name in (("kv", "KV_CACHE_PRECISION"), ("precision", "INFERENCE_PRECISION_HINT")):
            if option in options:
                properties[name] = options[option]
        self._pipe = self._genai.ContinuousBatchingPipeline(f"{model}-ov", scheduler, "CPU", properties)
        self._next_id = 0
        self.version = f"openvino-genai {self._genai.__version__}"

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = workload.output, True, False
        inputs = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        times: list[float] = []
        num_tokens = 0
        started = time.perf_counter()
        handles = [self._add(inputs[0], config)]
        while self._prime and not handles[0].can_read():
            self._pipe.step()
        handles += [self._add(tensor, config) for tensor in inputs[1:]]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            num_tokens += sum(_read(handle) for handle in handles)
            times.append(time.perf_counter())
        if workload.requests > 1:
            return Timing(times[-1] - started, num_tokens)
        return Timing(times[-1] - started, num_tokens, times[0] - started, times[-1] - times[0])

    def close(self) -> None:
        del self._pipe

    def _add(self, tensor: Any, config: Any) -> Any:
        self._next_id += 1
        return self._pipe.add_request(self._next_id, tensor, config)


def _read(handle: Any) -> int:
    return sum(len(output.generated_ids) for output in handle.read().values()) if handle.can_read() else 0


def _is_float32(model: str) -> bool:
    config = json.loads((Path(model) / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype")) == "float32"
