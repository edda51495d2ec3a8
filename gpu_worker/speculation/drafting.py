"""Sets up speculation in a worker: loads what drafts, checks that it fits the model, and makes the proposers."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from tokenloom.engine_core.data.config import KVCacheDtype, SpeculativeConfig
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory, PoolPart
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion

from ..attention.attention_backend import AttentionBackend
from ..attention.cache import kv_layout, make_kv_pool
from ..attention.grouped_backend import PoolLayers
from ..batch.input_batch import InputBatch
from ..checkpoint.draft_config import (
    check_draft,
    check_draft_dtype,
    check_head,
    mtp_names,
    read_eagle3,
    refuse_modules,
    refuse_states,
)
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..models.decoder import DecoderModel
from ..models.load_model import ModelLoader
from ..models.model import LanguageModel
from ..models.self_check import CheckedModel
from ..ops.torch_ops import TorchOps
from ..sampler.device.device_sampler import DeviceSampler
from .drafter import Drafter, DraftModel, make_recorded_drafter
from .eagle import Eagle3Head, EagleHead, EmbedsTokens, KeepsStates, MtpHead, load_greedy_head, mtp_config
from .greedy_drafts import load_greedy_drafts
from .lookup_proposers import NgramProposer, SuffixProposer
from .model_proposer import ModelProposer
from .rejection import RejectionSampler
from .speculation import Proposer

_CPU = torch.device("cpu")
GetModel = Callable[[], LanguageModel]
"""Returns the model that is drafted for, which sleep and new weights replace."""
_FIELD = "speculative_config.model"


# The drafter's layers are further layers of the same blocks, so prefix hits and transfers need no rule of their own. A
# token's draft KV lies in its own slot and depends on nothing later, because a block can be hit or sent as soon as it
# is full.
class Drafting:
    """Holds the draft model or the head of a worker, if the method has one."""

    def __init__(
        self,
        config: SpeculativeConfig,
        loader: ModelLoader,
        target: GetModel,
        kv_cache_dtype: KVCacheDtype = "auto",
        target_path: Callable[[], Path] = Path,
    ) -> None:
        """Load what drafts. Raises ``ValueError`` naming what does not fit the model. ``target_path`` returns where the
        weights of the target are from, among which are those of its own head (MTP)."""
        self._config = config
        self._is_plugged = ":" in loader.model_impl
        # What drafts has weights of its own, and is computed by built-in layers, whatever computes the model.
        self._loader = loader = replace(loader, load_format="auto", model_impl="auto")
        self._target = target
        self._target_path = target_path
        self._proposers: list[ModelProposer] = []
        self.kv_config: ModelConfig | None = None
        """Describes the layers that lie behind the model's in the KV pool; None: there are none."""
        if config.method == "mtp":
            # As the files describe it: the model here may be the part of a rank, and the head is whole.
            whole = loader.read_config(self._path)
            self._names = mtp_names(whole)
            self.kv_config = replace(mtp_config(whole), kv_cache_dtype=kv_cache_dtype)
            self._drafter: Drafter | None = self._load()
        elif config.method == "eagle3":
            self._entries = read_eagle3(self._path, loader.dtype)
            self.kv_config = replace(self._entries.config, kv_cache_dtype=kv_cache_dtype)
            self._drafter = self._load()
        elif config.writes_kv:
            self.kv_config = replace(loader.read_config(self._path), kv_cache_dtype=kv_cache_dtype)
            check_draft(self.kv_config, target().config)
            self._drafter = self._load()

    @property
    def _path(self) -> Path:
        return self._target_path() if self._config.method == "mtp" else Path(self._config.model)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in the layers of what drafts, in bytes."""
        return 0 if self.kv_config is None else self.kv_config.kv_bytes_per_token

    def make(
        self,
        batch: InputBatch,
        make_backend: Callable[[ModelConfig], AttentionBackend],
        num_blocks: int,
        block_size: int,
        memory: PoolMemory | None,
        layers: PoolLayers | None = None,
        *,
        records: bool = True,
        device_sampler: DeviceSampler | None = None,
    ) -> tuple[Proposer, RejectionSampler | None]:
        """Return the proposer for a batch, and how its drafts are accepted (see :class:`ModelRunner`).

        ``memory`` holds the pool, with the model's ``layers`` first; None: these share a table, and torch allocates.
        ``records``: whether steps run from recordings. ``device_sampler``: as in :class:`ModelProposer`.
        """
        config = self._config
        rejection = RejectionSampler() if config.rejection_sample_method == "probabilistic" else None
        if config.method == "suffix":
            return SuffixProposer(batch, config), rejection
        if self.kv_config is None:
            return NgramProposer(batch, config.prompt_lookup_min, config.prompt_lookup_max), rejection
        assert self._drafter is not None, "the weights are asleep"
        backend = make_backend(self.kv_config)
        if layers is not None:
            backend = layers.make_drafter_backend(backend)
        if memory is not None:
            assert layers is not None, "they lie first"
            memory = PoolPart(memory, num_blocks * block_size * layers.bytes_per_slot)
        make_kv_caches = functools.partial(backend.allocate, num_blocks, memory)
        device = self._loader.device or _CPU
        # The states that an EAGLE-3 head begins with are wider than its own.
        records = records and config.method != "eagle3"
        recorded = make_recorded_drafter(backend, batch) if records else None
        parts = (device, rejection, recorded, device_sampler)
        proposer = ModelProposer(batch, self._drafter, backend, make_kv_caches, *parts)
        self._proposers = [proposer]  # that of a profile before it is gone
        return proposer, rejection

    def kv_pool(self, pool: KVPool, num_blocks: int, block_size: int, layers: PoolLayers) -> KVPool:
        """Return the ``pool`` of the model's ``layers`` with the regions of these behind its own."""
        if self.kv_config is None:
            return pool
        own = make_kv_pool(self.kv_config, num_blocks, block_size, pool.host)
        offset = num_blocks * block_size * layers.bytes_per_slot
        behind = tuple(KVRegion(region.offset + offset, region.block_bytes) for region in own.regions)
        return KVPool(pool.memory, pool.regions + behind, num_blocks, self.kv_layout(pool.layout, block_size))

    def kv_layout(self, layout: str, block_size: int) -> str:
        """Return the name of the model's ``layout`` with these layers behind it."""
        return layout if self.kv_config is None else f"{layout}+{kv_layout(self.kv_config, block_size)}"

    def drop(self) -> None:
        """Drop the weights; :meth:`restore` reads them again."""
        self._drafter = None
        for proposer in self._proposers:
            proposer.drafter = None

    def restore(self) -> None:
        """Bring back dropped weights, and take over those of the model that a head uses. Raises ``ValueError`` as the
        constructor."""
        if self.kv_config is not None and (self._drafter is None or self._config.method != "draft_model"):
            self._drafter = self._load()
            for proposer in self._proposers:
                proposer.drafter = self._drafter

    def check(self, path: Path) -> None:
        """Check that :meth:`restore` will work with weights of the model from ``path``, without reading the content of
        tensors. Raises ``ValueError`` if these bring no head, which the method needs."""
        if self._config.method == "mtp":
            assert self.kv_config is not None
            self._load_own_head(self.kv_config, path, torch.device("meta"))

    def _load(self) -> Drafter:
        assert self.kv_config is not None
        if self._config.method == "eagle":
            return self._load_head(self.kv_config)
        if self._config.method == "eagle3":
            return self._load_eagle3()
        if self._config.method == "mtp":
            return self._load_own_head(self.kv_config, self._path, self._loader.device or _CPU)
        model = self._loader.load(self._path)
        if isinstance(model, CheckedModel):
            raise refuse_modules(self._path.name)
        if model.config.states is not None:
            raise refuse_states(self._path.name)
        return DraftModel(model, load_greedy_drafts(self._path, self.kv_config, self._loader.device or _CPU))

    def _load_head(self, config: ModelConfig) -> EagleHead:
        target = self._target().config
        if not isinstance(self._target(), EmbedsTokens):
            raise ValueError(f"{_FIELD}: EAGLE heads do not draft for models of the family {target.family}")
        check_head(config, target)
        loader, device = self._loader, self._loader.device or _CPU
        get_target = cast("Callable[[], EmbedsTokens]", self._target)
        # The embeddings and logits of a plugin's class need not be rows and products of matrices.
        is_known = not self._is_plugged or type(self._target()) is DecoderModel
        at_once = load_greedy_head(self._path, config, self._target(), device) if is_known else None
        with Checkpoint(self._path, config.dtype, device, config.scheme) as checkpoint:
            head = EagleHead(checkpoint, config, loader.ops or TorchOps(), device, get_target, at_once)
            checkpoint.refuse_rest()
        return head

    def _load_eagle3(self) -> Eagle3Head:
        entries, target = self._entries, self._target()
        layers = entries.layers_of(target.config)
        if not isinstance(target, KeepsStates):  # a plugin's class; families were checked
            raise ValueError(
                "speculative_config: the method eagle3 reads layers, which the model's class does not keep"
            )
        check_draft_dtype(entries.config, target.config)
        loader, device, config = self._loader, self._loader.device or _CPU, entries.config
        get_target = cast("Callable[[], KeepsStates]", self._target)
        with Checkpoint(self._path, config.dtype, device, config.scheme) as checkpoint:
            head = Eagle3Head(checkpoint, entries, layers, loader.ops or TorchOps(), device, get_target)
            checkpoint.refuse_rest()
        return head

    def _load_own_head(self, config: ModelConfig, path: Path, device: torch.device) -> MtpHead:
        loader, get_target = self._loader, cast("Callable[[], EmbedsTokens]", self._target)
        with Checkpoint(path, config.dtype, device, config.scheme) as checkpoint:
            return MtpHead(checkpoint, config, self._names, loader.ops or TorchOps(), device, get_target)
