"""Runs llama.cpp through llama-cpp-python's C interface: many sequences in one batch. Reads ``MODEL-<type>.gguf``."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

from ..workloads import Timing, Workload

_BATCH = 2048
_TYPES = {"float32": "f32", "bfloat16": "bf16"}


class LlamaCpp:
    """Options: `type` (which GGUF; by default the checkpoint's own: bf16 or f32), `ubatch`."""

    def __init__(self, model: str, threads: int, workloads: list[Workload], options: dict[str, str]) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        lib = self._lib
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)  # the library needs it to stay alive
        lib.llama_log_set(self._quiet, None)
        config = json.loads((Path(model) / "config.json").read_text())
        kind = options.get("type") or _TYPES[config.get("dtype") or config["torch_dtype"]]
        path = f"{model}-{kind}.gguf"
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._context = lib.llama_init_from_model(self._model, self._parameters(threads, workloads, options))
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(_BATCH, 0, max(w.requests for w in workloads))
        self._greedy = lib.llama_sampler_init_greedy()
        self.version = f"llama-cpp-python {lib.__version__}"

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        self._lib.llama_memory_clear(self._memory, True)
        times: list[float] = []
        started = time.perf_counter()
        self._share_prefix(workload, prompts)
        last = self._prefill(workload, prompts)
        times.append(time.perf_counter())
        for position in range(workload.prompt_len, workload.prompt_len + workload.output - 1):
            self._decode([(token, position, sequence, True) for sequence, token in enumerate(last)])
            last = [self._sample(sequence) for sequence in range(workload.requests)]
            times.append(time.perf_counter())
        num_tokens = workload.requests * len(times)
        if workload.requests > 1:
            return Timing(times[-1] - started, num_tokens)
        return Timing(times[-1] - started, num_tokens, times[0] - started, times[-1] - times[0])

    def close(self) -> None:
        self._lib.llama_free(self._context)

    def _parameters(self, threads: int, workloads: list[Workload], options: dict[str, str]) -> Any:
        parameters = self._lib.llama_context_default_params()
        parameters.n_seq_max = max(w.requests for w in workloads)
        parameters.n_ctx = max(w.requests * (w.prompt_len + w.output) for w in workloads) + 256
        parameters.n_batch = _BATCH
        parameters.n_ubatch = int(options.get("ubatch", "512"))
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = True  # sequences can share a prefix
        if hasattr(parameters, "flash_attn_type"):
            parameters.flash_attn_type = 1
        return parameters

    def _share_prefix(self, workload: Workload, prompts: list[list[int]]) -> None:
        """Compute the common tokens once and share them with every sequence."""
        for start in range(0, workload.shared, _BATCH):
            part = prompts[0][start : min(start + _BATCH, workload.shared)]
            self._decode([(token, start + index, 0, False) for index, token in enumerate(part)])
        for sequence in range(1, workload.requests if workload.shared else 1):
            self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _prefill(self, workload: Workload, prompts: list[list[int]]) -> list[int]:
        """Compute as many whole prompts at once as fit, and return the first token of each."""
        last: list[int] = []
        per_batch = max(1, _BATCH // workload.unique)
        end = workload.prompt_len - 1
        for first in range(0, workload.requests, per_batch):
            sequences = range(first, min(workload.requests, first + per_batch))
            self._decode(
                [
                    (prompts[sequence][position], position, sequence, position == end)
                    for sequence in sequences
                    for position in range(workload.shared, workload.prompt_len)
                ]
            )
            last += [self._sample((index + 1) * workload.unique - 1) for index in range(len(sequences))]
        return last

    def _sample(self, row: int) -> int:
        return int(self._lib.llama_sampler_sample(self._greedy, self._context, row))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """``rows`` hold token, position, sequence, and whether its logits are needed."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if status := self._lib.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with status {status}")
