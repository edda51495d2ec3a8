"""The worker on a CPU: loads a checkpoint, measures memory, runs steps."""

import sys
from pathlib import Path

import torch

from tokenloom.engine_core.config import EngineConfig
from tokenloom.engine_core.kv_transport import KVPool
from tokenloom.engine_core.pool_memory import PoolMemory
from tokenloom.engine_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.worker import ModelInfo

from .attention.cache import kv_layout, make_kv_pool
from .attention.interface import AttentionBackend
from .attention.registry import make_attention_backend
from .input_batch import InputBatch
from .memory import available_memory, peak_of
from .model_runner import ModelRunner
from .models.interface import Model
from .models.registry import load_model
from .ops.registry import make_ops

_CPU = torch.device("cpu")
_SHARE = 0.5
"""Of the memory that is left: the operating system's page cache and the other services need the rest."""


class CPUWorker:
    """Fulfils :class:`tokenloom.engine_core.worker.Worker` on the CPU of this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: Model | None = None
        self._backend: AttentionBackend | None = None
        self._runner: ModelRunner | None = None
        self._pool: KVPool | None = None

    def load_model(self) -> ModelInfo:
        """Loads the weights. Raises ``ValueError`` naming what in the checkpoint is wrong or not supported."""
        config = self._config.worker
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._model = load_model(Path(config.model), config.dtype, _CPU, make_ops(config.attention_backend, _CPU))
        model_config = self._model.config
        block_size = self._config.cache.block_size
        self._backend = make_attention_backend(config.attention_backend, model_config, block_size, _CPU)
        return ModelInfo(
            vocab_size=model_config.vocab_size,
            max_model_len=model_config.max_model_len,
            kv_bytes_per_token=model_config.kv_bytes_per_token,
            kv_layout=kv_layout(model_config, block_size),
            numerics=f"cpu/{model_config.dtype_name}/{self._backend.name}/torch-{torch.__version__}",
        )

    def determine_available_memory(self) -> int:
        """Half of what this host (or control group) has left beside the weights and a step's largest activations."""
        activations = peak_of(self._profile)
        return int(_SHARE * max(0, available_memory() - activations))

    def _profile(self) -> None:
        """A step that fills the token budget and in which as many requests as possible draw a token."""
        block_size = self._config.cache.block_size
        lengths = self._largest_step()
        runner = self._make_runner(num_blocks=sum(-(-length // block_size) for length in lengths))
        runner.dummy_run(lengths, block_size)

    def _largest_step(self) -> list[int]:
        """Query lengths of that step: the longest prompts that fit while each other request keeps a token."""
        scheduler = self._config.scheduler
        tokens = scheduler.max_num_batched_tokens
        lengths = []
        for others in range(min(scheduler.max_num_seqs, tokens) - 1, -1, -1):
            lengths.append(min(self._max_model_len, tokens - others))
            tokens -= lengths[-1]
        return lengths

    def initialize_kv_cache(self, num_blocks: int, memory: PoolMemory | None = None) -> None:
        """Makes the pool and computes one token, so that the first request finds warm code."""
        assert self._model is not None, "load_model comes first"
        model_config, block_size = self._model.config, self._config.cache.block_size
        if memory is None:
            memory = PoolMemory.allocate(num_blocks * block_size * model_config.kv_bytes_per_token, shared=False)
        self._pool = make_kv_pool(model_config, num_blocks, block_size, memory)
        self._runner = self._make_runner(num_blocks, memory)
        self._runner.dummy_run([1], block_size)

    def kv_pool(self) -> KVPool:
        assert self._pool is not None, "initialize_kv_cache comes first"
        return self._pool

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        assert self._runner is not None, "initialize_kv_cache comes first"
        self._runner.execute(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._runner is not None, "initialize_kv_cache comes first"
        return self._runner.sample(grammar)

    def shutdown(self) -> None:
        self._model = self._backend = self._runner = self._pool = None

    @property
    def _max_model_len(self) -> int:
        assert self._model is not None, "load_model comes first"
        return min(self._model.config.max_model_len, self._config.max_model_len or sys.maxsize)

    def _make_runner(self, num_blocks: int, memory: PoolMemory | None = None) -> ModelRunner:
        assert self._model is not None
        assert self._backend is not None
        config = self._config
        batch = InputBatch(config.scheduler.max_num_seqs, self._max_model_len, config.cache.block_size)
        return ModelRunner(self._model, self._backend, batch, num_blocks, memory)
