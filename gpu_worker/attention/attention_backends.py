"""Chooses the attention backend by name, and makes those of a worker as the engine's options say."""

from collections.abc import Callable

import torch

from tokenloom.engine_core.data.config import ATTENTION_BACKENDS, EngineConfig
from tokenloom.process.plugins import kv_marks, load

from ..checkpoint.local_config import LIBRARIES, library_lack
from ..checkpoint.model_config import ModelConfig
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import uses_triton
from ..parallel.group import RankGroup
from .attention_backend import TOKENWISE, AttentionBackend
from .context_backend import ContextBackend
from .cpu_backend import CPUBackend, TokenwiseBackend
from .cross_backend import CrossBackend
from .latent_backend import LatentBackend, LatentCPUBackend
from .torch_backend import ReferenceBackend, TorchBackend
from .varied_backend import VariedBackend

BESIDE_STATES = "cpu-tokenwise"
"""The name of attention in the order of ``tokenwise`` in engines that are not batch-invariant."""
NAMES = ATTENTION_BACKENDS


MakeBackend = Callable[[ModelConfig, int, torch.device], AttentionBackend]
"""What a plugin of the kind ``attention_backends`` is: it takes model, tokens of a block, and device."""


class WorkerBackends:
    """Makes the backends of one worker: for its model, and for what drafts."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Raises ``ValueError`` for a plugin that cannot be imported, or beside options that it cannot fulfil."""
        self._option = config.worker.attention_backend
        self._name = TOKENWISE if config.worker.batch_invariant else self._option
        self._block_size = config.cache.block_size
        self._device = device
        self._plugged = _plugged_backend(config)

    @property
    def name_for_ops(self) -> str:
        """The backend whose operations the model computes with; ``auto`` beside a plugin, which has none."""
        return self._name if self._plugged is None else "auto"

    @property
    def layout_marks(self) -> list[str]:
        """What ``ModelInfo.kv_layout`` says of a plugin: it may lay keys and values out in its own way, and each
        backend of a package in another."""
        return [] if self._plugged is None else list(kv_marks([self._option]))

    def make(self, model: ModelConfig, group: RankGroup) -> AttentionBackend:
        """Return the backend for a model. ``group``: the ranks among which its tokens are spread, if they are. Raises
        what :func:`make_attention_backend` raises."""
        block_size, device = self._block_size, self._device
        if model.shard.spreads_context:
            return ContextBackend(model, block_size, device, group)
        if self._plugged is not None:
            return self._plugged(model, block_size, device)
        backend = make_attention_backend(self._name, model, block_size, device)
        if not model.cross_rows:
            return backend
        rows = make_attention_backend(self._name, model, block_size, device)
        return CrossBackend(backend, rows, model.cross_rows, block_size)

    def title(self, backend: AttentionBackend) -> str:
        """Return what names a backend in ``numerics``. Two backends of a package may call themselves the same."""
        if self._plugged is not None:
            return f"{backend.name}-{self._option}"
        # Other versions of a library may sum in another order.
        library = LIBRARIES.get(backend.name)
        return backend.name if library is None else f"{backend.name}-{library.version}"


def _plugged_backend(config: EngineConfig) -> MakeBackend | None:
    if ":" not in config.worker.attention_backend:
        return None
    if config.parallel.world_size > 1 or config.worker.batch_invariant:
        raise ValueError(
            "attention_backend: a plugin computes alone and in its own order; leave parallelism and batch_invariant out"
        )
    found: MakeBackend = load("attention_backends", config.worker.attention_backend, config.plugins)
    return found


def make_attention_backend(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    """Return the backend ``name`` for a model.

    ``auto`` means ``cpu`` on a CPU, ``triton`` on a GPU and ``torch`` on other devices. In bfloat16 beside layers that
    keep a state it means ``cpu`` in the order of ``tokenwise``: states have the same bits wherever a prompt is cut, and
    so has attention then. If the kernels of ``cpu`` or ``triton`` cannot be had or do not know the model's shapes,
    ``torch`` replaces them. Nothing replaces ``tokenwise``, the name in batch-invariant engines: then it raises
    :class:`KernelsUnavailable`. Raises ``ValueError`` for an unknown name, for a backend of another device, and for a
    library that is not installed or lacks what the model needs.
    """
    if name in LIBRARIES:
        return _make_library(name, config, block_size, device)
    if config.kv_shapes or any(config.attention_chunks):
        return VariedBackend(config, block_size, lambda part: make_attention_backend(name, part, block_size, device))
    if name == TOKENWISE:
        if config.latent is not None:
            return LatentCPUBackend(config, block_size, device, name=name)
        return TokenwiseBackend(config, block_size, device)
    if config.latent is not None and name in NAMES and (name != "cpu" or device.type == "cpu") and name != "triton":
        return _make_latent(name, config, block_size, device)
    match name:
        case "triton" | "auto" if uses_triton(device):
            from .triton_backend import TritonBackend

            try:
                return TritonBackend(config, block_size, device)
            except KernelsUnavailable as error:
                warn_unavailable(str(error))
                return TorchBackend(config, block_size, device)
        case "triton":
            raise ValueError(f"attention_backend triton runs on a GPU where triton is installed, not on {device.type}")
        case "cpu" | "auto" if device.type == "cpu":
            try:
                if name == "auto" and config.states is not None and config.dtype == torch.bfloat16:
                    return TokenwiseBackend(config, block_size, device, name=BESIDE_STATES)
                return CPUBackend(config, block_size, device)
            except KernelsUnavailable as error:
                warn_unavailable(str(error))
                return TorchBackend(config, block_size, device)
        case "cpu":
            raise ValueError(f"attention_backend cpu does not run on {device.type}")
        case "auto" | "torch":
            return TorchBackend(config, block_size, device)
        case "reference":
            return ReferenceBackend(config, block_size, device)
    raise ValueError(f"attention_backend must be one of {', '.join(NAMES)}, not {name!r}")


def _make_library(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    if not uses_triton(device):
        raise ValueError(f"attention_backend {name} runs on a GPU where triton is installed, not on {device.type}")
    if lack := library_lack(name, config, config.kv_cache_dtype, block_size):
        raise ValueError(f"attention_backend {name}: {lack}")
    from .library_backends import make_library_backend

    return make_library_backend(name, config, block_size, device)


def _make_latent(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    if name in ("auto", "cpu") and device.type == "cpu":
        try:
            return LatentCPUBackend(config, block_size, device)
        except KernelsUnavailable as error:
            warn_unavailable(str(error))
    return LatentBackend(config, block_size, device, "reference" if name == "reference" else "torch")
