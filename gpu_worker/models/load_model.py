"""Loads a checkpoint with the model class of its architecture, which ``checkpoint.files.architectures`` lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from tokenloom.engine_core.data.config import KVCacheDtype
from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.process.plugins import load

from ..checkpoint.directory_source import DummySource
from ..checkpoint.files.architectures import ARCHITECTURES, LEARNED_POSITIONS
from ..checkpoint.files.config_reader import UnsupportedError, config_entries
from ..checkpoint.gguf.config import described_by, read_model
from ..checkpoint.load_config import load_model_config, note_precision, read_dtype
from ..checkpoint.local_config import local_config
from ..checkpoint.mixer_config import with_prompts
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.quantization.entries import Fp8
from ..checkpoint.served_how import ServedHow, check_dummy, choose, divides_kv, names_class
from ..checkpoint.weights import Adapt, Checkpoint, RenamedSource, WeightSource, open_files
from ..kernels.compiler import parallel_build
from ..kernels.prebuilt import Variant
from ..layers.linear import report_share
from ..ops.cpu_ops import CPUOps, TokenwiseOps
from ..ops.ops import Ops
from ..ops.torch_ops import TorchOps
from ..parallel.ranks import ONLY_RANK, Ranks, Stage
from .decoder import DecoderModel, relocate_experts
from .learned_positions import LearnedPositionsModel
from .mlp import MLP
from .model import LanguageModel

_PRODUCTS = {
    torch.bfloat16: ("bfloat16", "bfloat16_dots", "bfloat16_tiles"),
    torch.float32: ("floats",),
}
"""The kernels with which layers multiply, by the dtype of the weights."""


MakeModel = Callable[[Checkpoint, ModelConfig, Ops, torch.device, Stage | None], LanguageModel]


class PluggedArchitecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plugin of the kind ``model_architectures`` is: it says as which built-in class its own is read."""

    like: str
    """The built-in class whose entries and tensors a checkpoint has, under other names."""
    entries: dict[str, str] = {}
    """What that class calls entries of ``config.json``, by the names that a checkpoint has for them."""
    defaults: dict[str, Any] = {}
    """Entries of that class that a checkpoint does not state."""
    tensors: dict[str, str] = {}
    """What stands in that class's names of tensors for parts of a checkpoint's names, one after the other."""
    model: Any = None
    """A :data:`MakeModel` that computes it, such as a class derived from :class:`DecoderModel`; None: the built-in
    class does."""

    def read(self, path: Path) -> dict[str, Any]:
        """Return the entries of a checkpoint as those of the built-in class. Raises ``ValueError``."""
        # Both name the plugin's own class, and the entries are read as those of the class ``like``.
        values = {name: value for name, value in config_entries(path).items() if name not in ("model_type", "auto_map")}
        renamed = {self.entries.get(name, name): value for name, value in values.items()}
        if len(renamed) < len(values):
            names = [name for name, other in self.entries.items() if name in values and other in values]
            raise ValueError(f"{path / 'config.json'}: {names or list(self.entries)} state an entry twice")
        return self.defaults | renamed | {"architectures": [self.like]}


def plugged_architecture(impl: str, plugins: Sequence[str]) -> PluggedArchitecture:
    """Import a plugin ``PACKAGE:CLASS``. Raises ``ValueError`` if it says nothing of the kind."""
    value = load("model_architectures", impl, plugins)
    about = f"the plugin {impl} (model_architectures)"
    try:
        found = value if isinstance(value, PluggedArchitecture) else msgspec.convert(value, PluggedArchitecture)
    except msgspec.ValidationError as error:
        raise ValueError(f"{about} is no architecture: {error}") from None
    if ARCHITECTURES.get(found.like) in (None, "whisper"):
        raise ValueError(f"{about}: like must be one of {', '.join(ARCHITECTURES)}, not {found.like!r:.80}")
    if found.model is not None and not callable(found.model):
        raise ValueError(f"{about}: model must make a model of a checkpoint, and cannot be called")
    return found


def load_model(
    path: Path,
    dtype: str = "auto",
    device: torch.device | None = None,
    ops: Ops | None = None,
    quantization: str | None = None,
    model_impl: str = "auto",
    max_model_len: int | None = None,
    adapt: Adapt | None = None,
    ranks: Ranks = ONLY_RANK,
    load_format: str = "auto",
    plugins: Sequence[str] = (),
    kv_cache_dtype: KVCacheDtype = "auto",
    host_room: int = 0,
) -> LanguageModel:
    """Load the checkpoint directory ``path``, or the part of it that this one of ``ranks`` computes.

    ``dtype`` is ``auto`` (the checkpoint's own), ``float32`` or ``bfloat16``; ``device`` is the CPU by default, ``ops``
    are PyTorch's, ``quantization`` is None, ``int8-dynamic`` or ``int4``; ``model_impl`` is that of the engine's
    options, and so are ``max_model_len``, ``load_format``, ``plugins`` and ``kv_cache_dtype``. ``adapt`` and
    ``host_room`` as in :class:`Checkpoint`. Raises ``ValueError`` naming what the checkpoint lacks, or a feature that
    is not supported.
    """
    device = device or torch.device("cpu")
    found = _choose(path, dtype, quantization, model_impl, max_model_len, plugins)
    plugged = plugged_architecture(model_impl, plugins) if found.by == "plugin" else None
    if load_format == "dummy":
        check_dummy(path, found)
    note_precision(path, dtype, None if plugged is None else plugged.read(path))
    if not isinstance(found.config, ModelConfig):
        modules = _transformers(path, found.lack).TransformersModel
        options = (device, ops or TorchOps(), quantization, max_model_len, ranks, adapt)
        return _noted(found, lambda: modules(path, read_dtype(path, dtype), *options))
    config = _laid_out(found.config, ranks, ops)
    if config.latent is not None and config.mixer is not None and type(ops) is CPUOps:
        ops = TokenwiseOps()  # a token has the bits of any batch, as its states have
    if config.shard.spreads_context:
        states = None if ops is None or config.states is None else ops.states
        ops = TorchOps(config.num_kv_heads, states)  # the kernels write keys and values where they rotate them
    source = find_source(path, config, device, load_format, plugins, plugged)
    stage = Stage(ranks, config.hidden_size, config.dtype) if ranks.place.num_stages > 1 else None
    kernels = _kernels(config) if device.type == "cpu" else []
    opened = Checkpoint(path, config.dtype, device, config.scheme, adapt, ranks, source)
    with parallel_build(kernels), opened as checkpoint:
        checkpoint.host_room = host_room
        if kv_cache_dtype == "fp8" and divides_kv(config):
            config = replace(config, scales_kv=checkpoint.has_kv_scales)
        model: LanguageModel
        if plugged is not None and plugged.model is not None:
            model = _made(model_impl, lambda: plugged.model(checkpoint, config, ops or TorchOps(), device, stage))
            if host_room and checkpoint.host_room == host_room:
                raise ValueError(
                    f"cpu_offload_gb: the class of the plugin {model_impl} leaves no matrix of its layers on the host, "
                    "because it loads them without replace_layers (gpu_worker/models/model.py) or none is as small as "
                    "that: leave it out"
                )
        elif config.family in LEARNED_POSITIONS:
            model = LearnedPositionsModel(checkpoint, config, ops or TorchOps(), stage)
        else:
            model = DecoderModel(checkpoint, config, ops or TorchOps(), device, stage)
        if ranks.place.is_whole:  # other ranks read the rest, and :meth:`ModelLoader.load` has checked the whole
            checkpoint.refuse_rest()
    if quantization is not None and device.type != "meta":
        report_share(checkpoint.rounded, quantization)
    return model


def _laid_out(config: ModelConfig, ranks: Ranks, ops: Ops | None) -> ModelConfig:
    """Return what this one of ``ranks`` computes of a model with these operations; None: PyTorch's."""
    own = local_config(config, ranks.place)
    return own if own.states is None or ops is None else with_prompts(own, ops.states.prompts)


def _made(impl: str, make: Callable[[], LanguageModel]) -> LanguageModel:
    """Return the model that a plugin makes. Raises ``ValueError`` naming it for whatever it raises."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"the plugin {impl} (model_architectures): {type(error).__name__}: {error}") from error


def find_source(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    load_format: str,
    plugins: Sequence[str],
    plugged: PluggedArchitecture | None = None,
) -> WeightSource | None:
    """Return what has the tensors of a checkpoint; None: its files, in the formats that are built in. ``plugged``: how
    it names them; None: as built-in classes do."""
    if load_format == "dummy":
        return DummySource(config.dtype, device, has_output=not config.tie_word_embeddings)
    source: WeightSource | None = None
    if ":" in load_format:
        source = load("checkpoint_formats", load_format, plugins)(path)
    if plugged is None or not plugged.tensors:
        return source
    opened = source or open_files(path, config.scheme)
    try:
        return RenamedSource(opened, plugged.tensors)
    except ValueError:
        opened.close()
        raise


def _kernels(config: ModelConfig) -> list[Variant]:
    """Return the kernels of a model's steps, beside those that its operations loaded."""
    softcap = {} if config.attention_softcap is None else {"SOFTCAP": 1}
    attention: Variant = ("attention", {"HEAD_SIZE": config.cache_head_size} | softcap)
    if config.latent is not None:
        attention = ("latent", {"RANK": config.latent.rank, "WIDTH": config.head_size})
    products = _PRODUCTS[config.dtype]
    if config.scheme is not None:
        has_floats = isinstance(config.scheme, Fp8) or getattr(config.scheme, "format", None) == "float-quantized"
        products = ("float8", *products) if has_floats else ("quantized", "int8")
    return [attention, *((source, {}) for source in (*products, "batch", "replay"))]


def _choose(
    path: Path,
    dtype: str,
    quantization: str | None,
    model_impl: str,
    max_model_len: int | None = None,
    plugins: Sequence[str] = (),
) -> ServedHow:
    """Return what computes a checkpoint of a decoder. Raises ``ValueError``."""
    found = choose(path, dtype, quantization, model_impl, max_model_len)
    if found.by == "plugin":
        entries = plugged_architecture(model_impl, plugins).read(path)
        return replace(found, config=load_model_config(path, dtype, quantization, max_model_len, entries))
    lack = found.lack
    if lack is not None and not found.is_tried and not _transformers(path, lack).reads_entries(path, lack.unread):
        raise lack
    return found


def _noted(found: ServedHow, load: Callable[[], LanguageModel]) -> LanguageModel:
    """Load a model with transformers' modules, and say why the built-in code does not compute it though it has the
    class."""
    if found.lack is not None:
        OF_PROCESS.begin("slow_modules", str(found.lack))
    try:
        return load()
    except ValueError as error:
        if found.lack is None:
            raise
        raise ValueError(f"{found.lack}; transformers' modules do not compute it either: {error}") from error


def _transformers(path: Path, lack: UnsupportedError | None = None) -> ModuleType:
    """Return the module for models of transformers, which is imported only when it is needed.

    Raises ``ValueError`` if that library is not installed; ``lack`` is the reason to need it.
    """
    try:
        from .transformers import transformers_model
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        reason = lack or f"{described_by(path)}: architectures names {read_model(path)[0]}"
        raise ValueError(
            f'{reason}, which the transformers package computes; install it with: pip install "tokenloom[transformers]"'
        ) from None
    return transformers_model


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads checkpoints with the same settings, which are those of :func:`load_model`."""

    dtype: str = "auto"
    device: torch.device | None = None
    ops: Ops | None = None
    quantization: str | None = None
    model_impl: str = "auto"
    max_model_len: int | None = None
    adapt: Adapt | None = None
    ranks: Ranks = ONLY_RANK
    load_format: str = "auto"
    plugins: Sequence[str] = ()
    kv_cache_dtype: KVCacheDtype = "auto"
    host_room: int = 0

    def read_config(self, path: Path) -> ModelConfig:
        """Return the configuration of a checkpoint directory. Raises ``ValueError`` as :func:`load_model`."""
        found = self._choose(path)
        if isinstance(found.config, ModelConfig):
            own = _laid_out(found.config, self.ranks, self.ops)
            if self.kv_cache_dtype != "fp8" or not divides_kv(own):
                return own
            cpu = torch.device("cpu")
            with Checkpoint(path, own.dtype, cpu, own.scheme, source=self.source(path, own, cpu)) as checkpoint:
                return replace(own, scales_kv=checkpoint.has_kv_scales)
        config: ModelConfig = _transformers(path).read_declared(
            path, read_dtype(path, self.dtype), self.quantization, self.max_model_len
        )
        return config

    def load(self, path: Path) -> LanguageModel:
        """Load a checkpoint directory. Raises ``ValueError`` as :func:`load_model`."""
        if not self.ranks.place.is_whole:
            self.check(path)  # what one rank does not read, another one does
        return load_model(
            path,
            self.dtype,
            self.device,
            self.ops,
            self.quantization,
            self.model_impl,
            self.max_model_len,
            self.adapt,
            self.ranks,
            self.load_format,
            self.plugins,
            self.kv_cache_dtype,
            self.host_room,
        )

    def _choose(self, path: Path) -> ServedHow:
        return _choose(path, self.dtype, self.quantization, self.model_impl, self.max_model_len, self.plugins)

    def check(self, path: Path) -> None:
        """Raise the errors of :meth:`load` without reading the content of the tensors."""
        if self._choose(path).by == "transformers":
            _transformers(path).check_checkpoint(path, read_dtype(path, self.dtype))
        else:
            meta = torch.device("meta")
            load_model(
                path,
                self.dtype,
                meta,
                quantization=self.quantization,
                model_impl=self.model_impl,
                load_format=self.load_format,
                plugins=self.plugins,
            )

    def source(self, path: Path, config: ModelConfig, device: torch.device) -> WeightSource | None:
        """Return what has the tensors of a checkpoint, as :func:`find_source`."""
        return find_source(path, config, device, self.load_format, self.plugins, self.plugged(path))

    def plugged(self, path: Path) -> PluggedArchitecture | None:
        """Return the plugin that computes a checkpoint; None: none does."""
        is_plugged = ":" in self.model_impl and names_class(path, self.model_impl)
        return plugged_architecture(self.model_impl, self.plugins) if is_plugged else None

    def replace_weights(self, model: LanguageModel, path: Path) -> None:
        """Replace the weights of ``model`` with those of a checkpoint that passed :meth:`check`, layer by layer."""
        config = model.config
        device = self.device or torch.device("cpu")
        source = self.source(path, config, device)
        with Checkpoint(path, config.dtype, device, config.scheme, self.adapt, self.ranks, source) as checkpoint:
            checkpoint.host_room = self.host_room
            model.load_weights(checkpoint)

    def relocate_experts(self, model: LanguageModel, path: Path, held: Sequence[Mapping[int, MLP]]) -> None:
        """Load the experts of a checkpoint that ``model`` lacks in the places that it has now, as
        :func:`.decoder.relocate_experts`."""
        config = model.config
        device = self.device or torch.device("cpu")
        source = self.source(path, config, device)
        with Checkpoint(path, config.dtype, device, config.scheme, self.adapt, self.ranks, source) as checkpoint:
            relocate_experts(model, checkpoint, held)
