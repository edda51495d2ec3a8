"""Loads a checkpoint, measures memory and runs steps, on the device of its platform."""

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import ModelPooling
from tokenloom.engine_core.data.errors import WeightsDamagedError
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig, KVGroup, model_groups
from tokenloom.engine_core.data.lora import LoraInfo
from tokenloom.engine_core.data.model_info import FreedMemory, MediaTraits, ModelInfo, slots_offset
from tokenloom.engine_core.data.parallel_config import ExpertPeers
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.process.control_groups import resident_bytes
from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.process.memory import forget_start

from .attention.attention_backend import AttentionBackend
from .attention.attention_backends import WorkerBackends
from .attention.cache import make_kv_pool
from .attention.grouped_backend import PoolLayers
from .attention.states import StateSlots, state_regions
from .batch.input_batch import InputBatch
from .checkpoint.draft_config import read_eagle3
from .checkpoint.local_config import check_kv_dtype, check_options, num_sharing, state_prompts
from .checkpoint.mixer_config import check_state_prompts, has_chunks
from .checkpoint.model_config import ModelConfig
from .checkpoint.served_how import check_plugged, chosen_impl
from .device.cpu_watch import bind_to
from .device.pool_pages import PoolPages
from .device.profiler import Profiler
from .kernels.levels import limit_level
from .layers.linear import check_products
from .lora.slots import LoadedModel, LoraSlots
from .model_runner import ModelRunner, RunnerParts
from .model_slot import ModelSlot
from .models.decoder import DecoderModel, expert_layers
from .models.load_model import ModelLoader
from .models.model import LanguageModel, expert_counts, routes_of
from .models.self_check import CheckedModel, check_model
from .numerics import numerics_of
from .ops.cpu_ops import make_ops
from .ops.ops import Ops
from .parallel.ranks import ONLY_RANK, join_ranks
from .platform.platform import Platform, check_device
from .pooling.alignment import Aligner
from .pooling.pooler import Pooler, check_pooling, make_pooler
from .sampler.host.plugged_processors import load_logits_plugins
from .speculation.drafting import Drafting
from .step_recordings import StepRecordings, make_recorded_steps
from .warm_up import StartSteps, WarmedModel, largest_step, within
from .weights_scrub import ADAPTERS, WeightsScrub, weights_of

log = logging.getLogger(__name__)
_NO_RUNNER = "call initialize_kv_cache first"


def _with_impl(numerics: str, impl: str) -> str:
    """Return ``numerics`` with the plugin that computes the model: a package may have several for a checkpoint."""
    return f"{numerics}/{impl}" if ":" in impl else numerics


def _draws_on(platform: Platform) -> torch.device:
    """Return where tokens are drawn, and where plugins get logits that they take as tensors."""
    return torch.device("cpu") if platform.make_sampler() is None else platform.device


class ModelWorker:
    """Fulfils :class:`tokenloom.engine_core.executor.worker.Worker`."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        check_device(config, platform)
        check_options(config)
        self._config = config
        self._platform = platform
        self._backends = WorkerBackends(config, platform.device)
        self._ranks = ONLY_RANK
        self._num_sharing = num_sharing(config, None if platform.pool_is_on_host else platform.num_devices)
        self._device = platform.device
        self._loras = LoraSlots(config.lora, platform.device) if config.lora.enable else None
        self._slot: ModelSlot | None = None
        self._backend: AttentionBackend | None = None
        self._runner: ModelRunner | None = None
        self._pool: KVPool | None = None
        self._pages: PoolPages | None = None  # None: the pool is a device's
        self._drafting: Drafting | None = None
        self._scrub: WeightsScrub | None = None  # None: before the weights are loaded, and where none is wanted
        self._pooler: Pooler | None = None
        self._plugins = load_logits_plugins(config.plugins, _draws_on(platform)) if config.plugins else []
        self._profiler = Profiler(config.worker.profiler_dir)
        self._max_model_len = 0
        self._layers: PoolLayers | None = None
        self._steps: StartSteps | None = None
        self._num_states = 0  # slots for states, beside that of dummy steps

    def load_model(self) -> ModelInfo:
        """Load the weights. Raises ``ValueError`` naming what in the checkpoint is wrong or not supported."""
        config = self._config.worker
        # First: threads inherit where they may run from the one that starts them. Only the worker is bound, because
        # binding the whole engine took its front's core away (520 and 545 tokens/s on two engines, 660 with the worker
        # alone).
        bind_to(config.cpus)
        if config.processor_level != "auto":
            # Before anything is computed: oneDNN reads its limit once.
            limit_level(config.processor_level)
        self._platform.start(config.num_threads, self._num_sharing)
        # A head that drafts embeds tokens and computes logits by itself, on the rank that draws.
        speculative = self._config.speculative
        shares_ends = speculative is not None and speculative.method in ("eagle", "eagle3", "mtp")
        self._ranks = join_ranks(self._config.parallel, self._device, cuts_vocabulary=not shares_ends)
        loader = ModelLoader(
            dtype=config.dtype,
            device=self._device,
            ops=self._make_ops(),
            quantization=config.quantization,
            model_impl=chosen_impl(self._config),
            max_model_len=self._config.max_model_len,
            ranks=self._ranks,
            load_format=config.load_format,
            plugins=self._config.plugins,
            kv_cache_dtype=self._config.cache.dtype,
            host_room=int(config.cpu_offload_gb * (1 << 30)),
        )
        if ":" in loader.model_impl:
            # What no check before the start knows, because only a worker imports the plugin.
            check_plugged(self._config, replace(loader, ranks=ONLY_RANK).read_config(Path(config.model)))
        if config.state_prompts != "auto":
            check_state_prompts(loader.read_config(Path(config.model)), config.state_prompts)
        if self._config.cache.dtype != "auto":
            check_kv_dtype(loader.read_config(Path(config.model)), self._config.cache.dtype)
        if config.batch_invariant:
            check_products(loader.read_config(Path(config.model)).dtype)
        self._slot = ModelSlot(Path(config.model), self._adapting(loader))
        model_config = self._kv_config
        if model_config.cross_rows and not self._platform.pool_is_on_host:
            raise ValueError(f"models that transcribe sound do not run on {self._device.type} yet: choose --device cpu")
        if self._loras is not None:
            own = self._slot
            parts = (own.embed_tokens(), own.num_classes, own.read_again)
            reads_media = self._media_traits() is not None
            plugged = loader.plugged(own.path)
            names = {} if plugged is None else plugged.tensors
            self._loras.check_model(LoadedModel(model_config, *parts, reads_media, names))
        self._pooler = self._make_pooler()
        self._keep_inputs()
        self._max_model_len = min(model_config.max_model_len, self._config.max_model_len or sys.maxsize)
        block_size = self._config.cache.block_size
        if speculative is not None and self._ranks.place.samples:
            # The rank that draws drafts too, with the whole of what drafts; the others get drafts with the next step.
            dtype, slot = self._config.cache.dtype, self._slot
            alone = replace(loader, ranks=ONLY_RANK, host_room=0)
            self._drafting = Drafting(speculative, alone, lambda: self._model, dtype, lambda: slot.path)
        library, routes, place = None, routes_of(self._model), self._ranks.place
        self._ranks.balance(lambda: expert_layers(self._model), lambda: expert_counts(self._model))
        if isinstance(self._model, CheckedModel):
            # Over a KV cache of its own dtype: rounding would hide what its modules do.
            backend, has_stages = self._make_backend(_with_kept_heads(self._model.config)), place.num_stages > 1
            check_model(self._model, backend, block_size, self._device, has_stages=has_stages)
            library = self._model.library
        self._layers = PoolLayers(model_config, self._choose_groups(model_config))
        layout = self._layout(block_size)
        self._backend = self._layers.make_backend(self._make_backend, block_size)
        self._steps = self._start_steps()
        self._begin_scrub()
        return ModelInfo(
            vocab_size=model_config.vocab_size,
            hidden_size=model_config.embedding_size,
            # A stage knows the choices of its own layers only.
            experts_per_token=routes.num_layers * routes.top_k if routes and place.num_stages == 1 else 0,
            has_experts=model_config.experts is not None,
            max_model_len=model_config.max_model_len,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_layout=self._drafting.kv_layout(layout, block_size) if self._drafting else layout,
            state_bytes=model_config.state_bytes,
            state_chunk=model_config.states.chunk if model_config.states else 1,
            numerics=_with_impl(
                numerics_of(model_config, self._platform, self._backends.title(self._backend), library, place),
                loader.model_impl,
            ),
            kv_groups=self._layers.groups,
            pooling=self._pooler.info if self._pooler is not None else ModelPooling(),
            pool_is_on_host=self._platform.pool_is_on_host,
            fall_backs=OF_PROCESS.own(),
            draft_bytes_per_token=self._draft_bytes_per_token,
            media=self._media_traits(),
            num_threads=torch.get_num_threads() if self._device.type == "cpu" else 0,
            argument_schemas=[plugin.schema for plugin in self._plugins],
        )

    def _largest_step(self) -> list[int]:
        # The same on every rank, also where none of its layers keeps a state.
        mixer, prompts = self._model.config.mixer, state_prompts(self._config, self._device.type)
        in_chunks = mixer is not None and has_chunks(mixer, prompts)
        return largest_step(self._config.scheduler, self._max_model_len, in_chunks=in_chunks)

    def _make_ops(self) -> Ops:
        """Raises ``ValueError`` if prompts are to be computed by kernels that are not installed."""
        prompts, wanted = state_prompts(self._config, self._device.type), self._config.worker.state_prompts
        ops = make_ops(self._backends.name_for_ops, self._device, prompts)
        if wanted not in ("chunks", "fla"):
            return ops
        try:
            found = ops.states.prompts
        except ImportError as error:
            raise ValueError(f"state_prompts: fla-core lacks what prompts need: {error}") from error
        if found != wanted:
            raise ValueError(f"state_prompts: {wanted} needs Triton, which is not installed: choose scan")
        return ops

    def _begin_scrub(self) -> None:
        if (seconds := self._config.worker.weights_scrub_seconds) == 0:
            return
        refuse = weakref.WeakMethod(self._refuse_steps)  # a worker without other references is to be collected

        def on_damage(reason: str) -> None:
            if (call := refuse()) is not None:
                call(reason)

        self._scrub = WeightsScrub(self._device, seconds, on_damage)
        weakref.finalize(self, self._scrub.close)
        self._scrub.start(self._weights())

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that are compared with their checksums: not those of what drafts, whose tokens the model
        verifies, and on a GPU not those of adapters, which steps copy into slots."""
        if self._slot is None or not self._slot.is_loaded:
            return {}
        parts: dict[str, object] = {"model": self._slot.model, "pooler": self._pooler}
        if self._loras is not None and self._device.type == "cpu":
            parts[ADAPTERS] = self._loras.adapters
        return weights_of(parts, moves_experts=self._ranks.balancer is not None)

    def _changing_weights(self, *, adds: bool = False) -> contextlib.AbstractContextManager[None]:
        """Let a block change weights, as :meth:`.WeightsScrub.changing` says."""
        return contextlib.nullcontext() if self._scrub is None else self._scrub.changing(self._weights, adds=adds)

    def _refuse_steps(self, reason: str) -> None:
        """Raise ``WeightsDamagedError`` in the place of each step from now on. Called from any thread."""
        log.error("%s; no step is computed any more", reason)

        def damaged(*_: object) -> NoReturn:
            raise WeightsDamagedError(reason)

        # In the place of the methods, so that steps ask nothing while the weights are whole.
        refuse: Callable[..., NoReturn] = damaged
        self.execute_model = self.execute_dummy_batch = refuse  # type: ignore[method-assign]

    def _media_traits(self) -> MediaTraits | None:
        media = None if self._config.worker.language_model_only else self._model.config.media
        if (rows := self._model.config.cross_rows) > 0:
            return MediaTraits(("audio",), cross_rows=rows)
        return None if media is None else MediaTraits(media.kinds, media.levels)

    def _adapting(self, loader: ModelLoader) -> ModelLoader:
        return loader if self._loras is None else replace(loader, adapt=self._loras)

    def _choose_groups(self, config: ModelConfig) -> list[KVGroup]:
        if self._ranks.place.shares_table:
            return []  # ranks have the same groups
        groups = model_groups(config.kv_windows, self._max_model_len, self._config, config.kv_sources)
        speculative = self._config.speculative
        if speculative is not None and speculative.writes_kv and groups and groups[0].window is not None:
            return []  # what drafts sees every token, and no group keeps the blocks of all
        return groups

    def determine_available_memory(self) -> int:
        """Return what memory remains for KV, next to weights and a step's activations, if engines share the host."""
        steps = self._require_steps()
        largest = steps.compute_largest(self._largest_step())
        adapters = 0 if self._loras is None else self._loras.reserved_bytes()
        return self._platform.kv_memory(largest.activation_bytes + adapters + steps.graph_bytes(), self._num_sharing)

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, memory: PoolMemory | None = None) -> WarmUp:
        """Allocate the pool and the buffers for the fitted context length, and compute steps of the sizes to come."""
        scheduler, block_size, steps = self._config.scheduler, self._config.cache.block_size, self._require_steps()
        self._max_model_len = kv_cache.max_model_len
        if steps.largest is None:
            steps.compute_largest(within(kv_cache.num_blocks, block_size, self._largest_step()))
        started = time.perf_counter()
        if self._platform.pool_is_on_host:
            forget_start()  # before the steps below, which map again what steps need
        self._num_states = kv_cache.num_state_slots
        self._make_pool(kv_cache.num_blocks, memory)
        computed = steps.compute(self._require_runner(), kv_cache)
        if self._pool is not None and self._pool.device is None:
            step = scheduler.max_num_batched_tokens // block_size + scheduler.max_num_seqs
            self._pages = PoolPages(self._pool, first_blocks=step * max(1, len(kv_cache.groups)))
            self._pages.drop()  # most of them take memory when requests are about to write to them
            self._pages.begin()
        if (routes := routes_of(self._model)) is not None:
            routes.forget_device_counts()
        self._platform.return_freed()
        return msgspec.structs.replace(computed, seconds=computed.seconds + time.perf_counter() - started)

    def _make_pool(self, num_blocks: int, memory: PoolMemory | None) -> None:
        layers, block_size = self._pool_layers, self._config.cache.block_size
        if memory is None and self._platform.pool_is_on_host:
            blocks_bytes = num_blocks * block_size * (layers.bytes_per_slot + self._draft_bytes_per_token)
            slots_bytes = (self._num_states + 1) * layers.config.state_bytes
            memory = PoolMemory.allocate(slots_offset(blocks_bytes) + slots_bytes, shared=False)
        if memory is not None:
            own_size = block_size // layers.config.shard.context_size
            self._pool = make_kv_pool(layers.config, num_blocks, own_size, memory, self._layout(block_size))
            if self._drafting is not None:
                self._pool = self._drafting.kv_pool(self._pool, num_blocks, block_size, layers)
            if self._num_states:
                regions = state_regions(layers.config, self._num_states + 1, self._slots_at(num_blocks))
                self._pool = replace(self._pool, regions=self._pool.regions + regions, num_slots=self._num_states)
        self._runner = self._make_runner(num_blocks, memory)
        if memory is None and self._config.kv.transports:
            caches, layout = self._runner.kv_caches, self._layout(block_size)
            self._pool = self._platform.device_pool(caches, num_blocks, layout)
        self._runner.record_ahead()

    def _layout(self, block_size: int) -> str:
        """Return ``ModelInfo.kv_layout`` without what drafts."""
        return "/".join((self._pool_layers.layout(block_size), *self._backends.layout_marks))

    def _slots_at(self, num_blocks: int) -> int:
        """Return where the slots lie in the memory of a pool: behind its blocks."""
        return slots_offset(num_blocks * self._config.cache.block_size * self._kv_bytes_per_token)

    def kv_pool(self) -> KVPool:
        assert self._pool is not None, "call initialize_kv_cache first, with memory of the host or with transports"
        return self._pool

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if (watch := self._platform.cpu_watch) is not None:
            watch.before_step()
        if self._pages is not None:
            self._pages.follow(scheduler_output)
        assert self._runner is not None, _NO_RUNNER
        self._runner.execute(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        assert self._runner is not None, _NO_RUNNER
        return self._runner.sample(grammar)

    def sleep(self, level: int) -> FreedMemory:
        """Drop the weights and the KV pool, or its pages. At level 1 the weights of a GPU are kept in host memory;
        those of a CPU can be read from the files again. A device's pool stays if other processes may have mapped it."""
        slot, before, kept = self._require_slot(), self._platform.bytes_in_use(), 0
        with self._changing_weights():
            if level == 1 and not self._platform.pool_is_on_host:
                kept = slot.move_to_host()
            else:
                slot.drop(restorable=level == 1)
            if self._drafting is not None:
                self._drafting.drop()
            self._take_model()
        self._platform.return_freed()
        with_kv = self._platform.bytes_in_use()
        if self._pool is None:
            self._require_runner().drop_kv_caches()
        elif self._pages is not None:
            self._pages.drop()
        self._require_runner().drop_states()
        self._platform.return_freed()
        return FreedMemory(max(0, before - with_kv), max(0, with_kv - self._platform.bytes_in_use()), kept)

    def wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            with self._changing_weights():
                self._require_slot().restore()
                self._take_model()
            if self._drafting is not None:
                self._drafting.restore()
        if "kv_cache" in tags:
            self._require_runner().make_states()
        if "kv_cache" in tags and self._pages is not None:
            self._pages.begin()
        elif "kv_cache" in tags and self._pool is None:
            self._require_runner().make_kv_caches()
        if self._require_slot().is_loaded and self._require_runner().kv_caches:
            # As at the start: a first request of each size would wait for the capture of its graph.
            self._require_runner().record_ahead()

    def check_weights(self, path: str) -> None:
        self._require_slot().check(Path(path))
        if self._drafting is not None:
            self._drafting.check(Path(path))
        if not self._model.config.cross_rows:
            info, head = (None, None) if self._pooler is None else (self._pooler.info, self._pooler.head)
            config = self._kv_config
            check_pooling(info, Path(path), self._config.worker, config.hidden_size, head, config.has_output)

    def reload_weights(self, path: str) -> None:
        slot = self._require_slot()
        with self._changing_weights():
            try:
                slot.replace(Path(path))
                if self._loras is not None:
                    with slot.lost_on_error(Path(path)):
                        self._loras.weights_replaced()
            finally:  # the model is another one if it was asleep, or if the weights were lost
                self._take_model()
                self._platform.return_freed()
        if self._drafting is not None:
            self._drafting.restore()

    def load_lora(self, path: str) -> LoraInfo:
        with self._changing_weights(adds=True):
            return self._require_loras().load(Path(path))

    def drop_lora(self, digest: bytes) -> None:
        with self._changing_weights(adds=True):
            self._require_loras().drop(digest)

    def profile(self, start: bool, prefix: str = "") -> None:
        if start:
            self._profiler.start(prefix)
        else:
            self._profiler.stop()

    def execute_dummy_batch(self) -> None:
        if (watch := self._platform.cpu_watch) is not None:
            watch.before_step()
        self._require_runner().dummy_run([1], self._config.cache.block_size)
        self._ranks.forward_passed()

    def listen_experts(self, host: str) -> str:
        return self._ranks.spread_experts.listen(host)

    def join_experts(self, peers: ExpertPeers) -> None:
        slot, ranks = self._require_slot(), self._ranks
        layers = expert_layers(slot.model) if slot.is_loaded else []  # an engine that sleeps loads them when it wakes
        held = [layer.held() for layer in layers]
        with self._changing_weights():
            ranks.place_experts(peers)
            if any(layer.lacks(experts) for layer, experts in zip(layers, held, strict=True)):
                slot.relocate_experts(held)
            else:
                for layer, experts in zip(layers, held, strict=True):
                    layer.relocate(None, experts)
        ranks.join_experts(peers)

    def leave_experts(self) -> None:
        self._ranks.spread_experts.leave()

    def check_health(self) -> None:
        """Compute a sum on the device. Raises ``RuntimeError`` if the device fails or the sum is wrong, and
        ``WeightsDamagedError``."""
        if self._scrub is not None:
            if self._device.type != "cpu":
                self._scrub.look()
            if self._scrub.damage:
                raise WeightsDamagedError(self._scrub.damage)
        if float(torch.ones(8, device=self._device).sum()) != 8.0:
            raise RuntimeError(f"{self._device.type} computes wrong sums")

    def resident_bytes(self) -> int:
        return resident_bytes()

    def shutdown(self) -> None:
        self._profiler.close()
        if self._scrub is not None:
            self._scrub.close()
        if self._ranks.experts is not None:
            self._ranks.experts.close()
        if self._pages is not None:
            self._pages.close()
        self._slot = self._backend = self._runner = self._steps = self._pool = self._pages = self._drafting = None

    @property
    def _model(self) -> LanguageModel:
        return self._require_slot().model

    @property
    def _kv_config(self) -> ModelConfig:
        """The model's configuration, with the dtype of the KV cache that the engine's options choose."""
        return replace(_with_kept_heads(self._model.config), kv_cache_dtype=self._config.cache.dtype)

    @property
    def _kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in all layers, those of what drafts included."""
        return self._pool_layers.kv_bytes_per_token + self._draft_bytes_per_token

    @property
    def _draft_bytes_per_token(self) -> int:
        return self._drafting.kv_bytes_per_token if self._drafting is not None else 0

    @property
    def _pool_layers(self) -> PoolLayers:
        assert self._layers is not None, "load_model comes first"
        return self._layers

    def _take_model(self) -> None:
        if self._require_slot().is_loaded:
            self._pooler = self._make_pooler()
            self._keep_inputs()
        self._require_runner().set_model(self._model, self._pooler)
        self._ranks.weights_changed()

    def _keep_inputs(self) -> None:
        """Let the layers of every rank keep the inputs that an EAGLE-3 head reads on the one that draws: stages and
        ranks that divide prompts pass them on. Raises ``ValueError`` if the head does not fit the model."""
        drafts, place = self._config.speculative, self._ranks.place
        if drafts is not None and drafts.method == "eagle3" and place.num_stages * place.prefill_size > 1:
            layers = read_eagle3(Path(drafts.model), self._config.worker.dtype).layers_of(self._model.config)
            assert isinstance(self._model, DecoderModel), "its family was checked"
            self._model.kept_layers = layers

    def _make_pooler(self) -> Pooler | None:
        """Return what pools prompts. The rank that samples does; the others check new weights with theirs, so that all
        refuse the same."""
        config, model = self._config.worker, self._model
        if model.config.cross_rows:
            return Aligner.of_model(model.config) if self._ranks.place.is_alone else None
        head = model.head if isinstance(model, DecoderModel) else None
        path, hidden_size, has_output = self._require_slot().path, model.config.hidden_size, model.config.has_output
        return make_pooler(path, config, hidden_size, head, is_encoder=False, has_output=has_output)

    def _require_slot(self) -> ModelSlot:
        assert self._slot is not None, "load_model comes first"
        return self._slot

    def _require_steps(self) -> StartSteps:
        assert self._steps is not None, "load_model comes first"
        return self._steps

    def _require_loras(self) -> LoraSlots:
        assert self._loras is not None, "LoRA adapters are not enabled"
        return self._loras

    def _require_runner(self) -> ModelRunner:
        assert self._runner is not None, _NO_RUNNER
        return self._runner

    def _start_steps(self) -> StartSteps:
        warmed = WarmedModel(
            model=self._kv_config,
            layers=self._pool_layers,
            make_runner=lambda num_blocks: self._make_runner(num_blocks),
            loras=self._loras,
            media=self._media_traits(),
            draft_bytes_per_token=self._draft_bytes_per_token,
            is_alone=self._ranks.place.is_whole,
        )
        return StartSteps(self._config, self._platform, warmed)

    def _make_runner(self, num_blocks: int, memory: PoolMemory | None = None) -> ModelRunner:
        assert self._backend is not None, "load_model comes first"
        config = self._config
        max_num_seqs, block_size = config.scheduler.max_num_seqs, config.cache.block_size
        num_groups = self._pool_layers.num_groups
        cross_blocks = -(-self._kv_config.cross_rows // block_size)
        batch = InputBatch(
            max_num_seqs, self._max_model_len, block_size, num_groups, num_blocks, cross_blocks, self._plugins
        )
        proposer = rejection = None
        device_sampler = self._platform.make_sampler()
        if self._drafting is not None:
            records = not config.worker.enforce_eager
            where = (num_blocks, block_size, memory, self._pool_layers)
            proposer, rejection = self._drafting.make(
                batch, self._make_backend, *where, records=records, device_sampler=device_sampler
            )
        states = None
        if self._kv_config.states is not None:
            slots_memory = None if memory is None else memory.buffer[self._slots_at(num_blocks) :]
            states = StateSlots(self._kv_config, self._num_states, self._device, slots_memory)
        parts = RunnerParts(
            device=self._device,
            device_sampler=device_sampler,
            proposer=proposer,
            rejection=rejection,
            recordings=self._make_recorded(batch),
            loras=self._loras,
            pooler=self._pooler,
            ranks=self._ranks,
            states=states,
        )
        return ModelRunner(
            self._model,
            self._backend,
            batch,
            num_blocks,
            memory,
            parts,
            count_nans=config.worker.compute_nans_in_logits,
            logits_metrics_interval=config.worker.logits_metrics_interval,
        )

    def _make_recorded(self, batch: InputBatch) -> StepRecordings | None:
        assert self._backend is not None, "load_model comes first"
        keeps_states = self._config.speculative is not None and self._config.speculative.method == "eagle3"
        if (
            keeps_states
            or self._kv_config.cross_rows
            or (not self._ranks.place.is_whole and self._device.type != "cpu")
        ):
            # No recording has what stands beside prompts, or keeps states of layers, and a graph of a GPU holds no
            # exchange with other GPUs.
            return None
        options, most_tokens = self._config.worker, self._config.scheduler.max_num_batched_tokens
        # With a window in every layer no layer reads them.
        shares = not options.disable_cascade_attn and None in self._kv_config.sliding_windows
        return make_recorded_steps(
            self._backend, self._platform, batch, most_tokens, eager=options.enforce_eager, shares=shares
        )

    def _make_backend(self, model_config: ModelConfig) -> AttentionBackend:
        return self._backends.make(model_config, self._ranks.group)


def _with_kept_heads(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the KV heads that a rank keeps: all of them where tokens are spread over ranks."""
    return replace(config, num_kv_heads=config.shard.num_kv_heads) if config.shard.spreads_context else config
