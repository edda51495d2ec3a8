"""Computes the steps of an encoder: each step holds whole prompts, and nothing is kept between steps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import CorePoolingParams, ModelPooling
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.lora import LoraInfo
from tokenloom.engine_core.data.model_info import FreedMemory, ModelInfo
from tokenloom.engine_core.data.parallel_config import ExpertPeers
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.process.control_groups import resident_bytes
from tokenloom.process.fall_backs import OF_PROCESS

from ..checkpoint.local_config import NO_ADAPTERS
from ..checkpoint.weights import FileStamps, check_unchanged, file_stamps
from ..device.cpu_watch import bind_to
from ..device.profiler import Profiler
from ..parallel.ranks import ONLY_RANK, join_ranks
from ..platform.platform import Platform
from ..pooling.class_head import ClassHead
from ..pooling.pooler import Floats, Pooler, check_pooling, make_pooler
from .encoder import EncoderModel, EncoderShape, load_encoder, read_encoder_shape


class _Prompt(NamedTuple):
    token_ids: list[int]
    params: CorePoolingParams


class _Offered(NamedTuple):
    """Describes the loaded model, awake or asleep: other weights must fit it."""

    config: EncoderShape
    pooling: ModelPooling
    head: ClassHead | None
    """Without its weights."""


# A worker of its own: an encoder keeps no KV and draws no token, and most of the model worker is about both. The
# scheduler needs no second path, since blocks without bytes cost nothing.
class EncoderWorker:
    """Fulfils :class:`tokenloom.engine_core.executor.worker.Worker`."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._config = config
        self._platform = platform
        self._path = Path(config.worker.model)
        self._stamps: FileStamps | None = None
        self._model: EncoderModel | None = None
        self._pooler: Pooler | None = None
        self._offered: _Offered | None = None
        self._checked: tuple[Path, FileStamps] | None = None  # what may be loaded in the place of the weights
        self._ranks = ONLY_RANK
        self._prompts: dict[str, _Prompt] = {}
        self._output = ModelRunnerOutput([], [])
        self._profiler = Profiler(config.worker.profiler_dir)

    def load_model(self) -> ModelInfo:
        """Load the weights. Raises ``ValueError`` naming what in the checkpoint is wrong or not supported."""
        if self._config.lora.enable:
            raise ValueError(f"{NO_ADAPTERS}; its architecture is not supported")
        bind_to(self._config.worker.cpus)
        self._platform.start(self._config.worker.num_threads, self._config.cache.engines_on_host)
        self._ranks = join_ranks(self._config.parallel, self._platform.device)
        self._load(self._path)
        assert self._model is not None
        assert self._pooler is not None
        config, head = self._model.config, self._model.head
        self._offered = _Offered(config, self._pooler.info, head and replace(head, projections=()))
        device, dtype, order = self._platform.device.type, config.dtype_name, self._ranks.place.numerics
        numerics = (device, dtype, self._config.worker.quantization, "encoder", f"torch-{torch.__version__}", order)
        return ModelInfo(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            kv_bytes_per_token=0,
            kv_layout="none",
            numerics="/".join(part for part in numerics if part),
            hidden_size=config.hidden_size,
            pooling=self._pooler.info,
            fall_backs=OF_PROCESS.own(),
        )

    def _load(self, path: Path) -> None:
        settings = self._config.worker
        if settings.load_format == "dummy":
            raise ValueError("load_format dummy makes weights for models that generate text, not for encoders")
        stamps = file_stamps(path)  # before loading, so that a file that changes during the load is noticed later
        if not self._ranks.place.is_whole:
            load_encoder(path, settings.dtype, torch.device("meta"))  # refuses what no rank would read
        model = load_encoder(path, settings.dtype, self._platform.device, settings.quantization, self._ranks)
        pooler = make_pooler(path, settings, model.config.hidden_size, model.head, is_encoder=True)
        self._model, self._pooler, self._path, self._stamps = model, pooler, path, stamps

    def determine_available_memory(self) -> int:
        """Return 0: an encoder's blocks hold nothing."""
        return 0

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, memory: PoolMemory | None = None) -> WarmUp:
        """Compute a step of one prompt of the longest length."""
        started, length = time.perf_counter(), kv_cache.max_model_len
        self._forward([[0] * length], [length])
        return WarmUp(seconds=time.perf_counter() - started, prefill_tokens=length)

    def kv_pool(self) -> KVPool:
        raise AssertionError("an encoder keeps no KV")

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if (watch := self._platform.cpu_watch) is not None:
            watch.before_step()
        self._update(scheduler_output)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        pooled = self._pool(req_ids) if req_ids else {}
        self._output = ModelRunnerOutput(req_ids, [[] for _ in req_ids], pooled=pooled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        return self._output

    def _update(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            self._prompts.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            assert new.pooling_params is not None, "the core refuses requests that generate"
            self._prompts[new.req_id] = _Prompt(new.prompt_token_ids, new.pooling_params)

    def _pool(self, req_ids: list[str]) -> dict[str, Floats]:
        assert self._pooler is not None, "the weights are asleep"
        prompts = [self._prompts[req_id] for req_id in req_ids]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        firsts = [prompt.params.first_part_tokens or length for prompt, length in zip(prompts, lengths, strict=True)]
        hidden, results = self._forward([prompt.token_ids for prompt in prompts], firsts), dict[str, Floats]()
        if not self._ranks.place.samples:
            return results  # the rank that has the last states pools them
        for req_id, prompt, part in zip(req_ids, prompts, torch.split(hidden, lengths), strict=True):
            states = self._pooler.start(prompt.params)
            states.add(part)
            results[req_id] = self._pooler.finish(states, prompt.params)
        return results

    @torch.inference_mode()
    def _forward(self, prompts: list[list[int]], firsts: list[int]) -> torch.Tensor:
        """Return the hidden states [T, hidden_size] of prompts, whose first tokens ``firsts`` have type 0."""
        assert self._model is not None, "the weights are asleep"
        begins = np.cumsum([0, *map(len, prompts)])
        positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
        types = positions >= np.repeat(firsts, np.diff(begins))
        arrays = (np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts]), positions, types)
        device = self._platform.device
        token_ids, at, kinds = (torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays)
        return self._model.forward(token_ids, at, kinds, begins.tolist())

    def sleep(self, level: int) -> FreedMemory:
        """Drop the weights. At level 1 they can be read from the files again."""
        before = self._platform.bytes_in_use()
        self._model = self._pooler = None
        if level == 2:
            self._stamps = None
        self._platform.return_freed()
        return FreedMemory(max(0, before - self._platform.bytes_in_use()))

    def wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags and self._model is None:
            check_unchanged(self._path, self._stamps)
            self._load(self._path)

    def check_weights(self, path: str) -> None:
        settings, directory = self._config.worker, Path(path)
        try:
            config = read_encoder_shape(directory, settings.dtype)
            stamps = file_stamps(directory)
        except OSError as error:
            raise ValueError(f"the checkpoint {path} cannot be read: {error}") from error
        assert self._offered is not None, "load_model comes first"
        if config != self._offered.config:
            raise ValueError("the new checkpoint has another configuration than the loaded one: not the same model")
        check_pooling(self._offered.pooling, directory, settings, config.hidden_size, self._offered.head)
        self._checked = directory, stamps

    def reload_weights(self, path: str) -> None:
        if self._checked is None or self._checked[0] != Path(path):
            self.check_weights(path)
        checked, self._checked = self._checked, None
        self._load(Path(path))
        if (self._path, self._stamps) != checked:
            self._model = self._stamps = None
            raise RuntimeError(f"{path}: the files changed after they were checked; call reload_weights again")

    def load_lora(self, path: str) -> LoraInfo:
        raise ValueError("an encoder cannot have LoRA adapters")

    def drop_lora(self, digest: bytes) -> None:
        """Do nothing: this worker has no adapters."""

    def profile(self, start: bool, prefix: str = "") -> None:
        if start:
            self._profiler.start(prefix)
        else:
            self._profiler.stop()

    def execute_dummy_batch(self) -> None:
        raise AssertionError("an encoder has no experts, so it computes in no waves")

    def listen_experts(self, host: str) -> str:
        raise AssertionError("an encoder has no experts")

    def join_experts(self, peers: ExpertPeers) -> None:
        raise AssertionError("an encoder has no experts")

    def leave_experts(self) -> None:
        raise AssertionError("an encoder has no experts")

    def check_health(self) -> None:
        """Compute a sum on the device. Raises ``RuntimeError`` if the device fails or the sum is wrong."""
        if float(torch.ones(8, device=self._platform.device).sum()) != 8.0:
            raise RuntimeError(f"{self._platform.device.type} computes wrong sums")

    def resident_bytes(self) -> int:
        return resident_bytes()

    def shutdown(self) -> None:
        self._profiler.close()
        self._model = self._pooler = None
