"""The model that a worker computes with, and its weights' life: loaded, dropped and brought back, or replaced."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from .attention.attention_backend import AttentionPlan, KVCache
from .checkpoint.model_config import ModelConfig, load_model_config
from .checkpoint.weights import FileStamps, file_stamps
from .layers.embedding import InputEmbeds
from .models.model import Model


class AbsentModel:
    """Stands where a model was whose weights were dropped."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
    ) -> NoReturn:
        raise AssertionError("the weights are asleep")

    def compute_logits(self, hidden: Tensor) -> NoReturn:
        raise AssertionError("the weights are asleep")


class ModelSlot:
    """Holds one model of a fixed configuration."""

    def __init__(self, path: Path, dtype: str, load: Callable[[Path], Model]) -> None:
        """Loads the checkpoint directory ``path``. Raises ``ValueError`` naming what it lacks or is not supported."""
        self._path = path
        self._dtype = dtype
        self._load = load
        # Taken before loading: a file that changes meanwhile is found out later rather than never.
        self._stamps: FileStamps | None = file_stamps(path)
        self.model: Model = load(path)

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.model, AbsentModel)

    def drop(self, *, restorable: bool) -> None:
        """Forgets the weights, which only :meth:`restore`, if ``restorable``, and :meth:`replace` bring back."""
        self.model = AbsentModel(self.model.config)
        if not restorable:
            self._stamps = None

    def restore(self) -> None:
        """Loads the same weights again. Raises ``ValueError`` if the files changed, or the weights are not to come
        back."""
        if self.is_loaded:
            return
        if self._stamps is None:
            raise ValueError("the weights were dropped for good: reload_weights brings some")
        if file_stamps(self._path) != self._stamps:
            raise ValueError("the checkpoint's files changed since they were loaded: reload_weights takes the new ones")
        self.model = self._load(self._path)

    def replace(self, path: Path) -> None:
        """Takes the weights of another checkpoint of the same configuration. Raises ``ValueError`` naming the first
        difference, or what is wrong with it; what was there stays then."""
        ours = self.model.config
        theirs = load_model_config(path, self._dtype, ours.quantization)
        for field in dataclasses.fields(ModelConfig):
            old, new = getattr(ours, field.name), getattr(theirs, field.name)
            if old != new:
                raise ValueError(f"{field.name} is {new} there and {old} here: not the same architecture")
        stamps = file_stamps(path)
        self.model = self._load(path)
        self._path, self._stamps = path, stamps
