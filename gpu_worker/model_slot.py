"""Holds the model of a worker, whose weights can be loaded, dropped and restored, or replaced."""

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
    """Replaces a model whose weights were dropped."""

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
        """Load the checkpoint directory ``path``. Raises ``ValueError`` naming what is missing or not supported."""
        self._path = path
        self._dtype = dtype
        self._load = load
        # Recorded before loading, so that a file that changes during the load is noticed later.
        self._stamps: FileStamps | None = file_stamps(path)
        self.model: Model = load(path)

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.model, AbsentModel)

    def drop(self, *, restorable: bool) -> None:
        """Drop the weights. Only :meth:`restore`, if ``restorable``, and :meth:`replace` bring them back."""
        self.model = AbsentModel(self.model.config)
        if not restorable:
            self._stamps = None

    def restore(self) -> None:
        """Load the same weights again. Raises ``ValueError`` if the files changed or may not be loaded again."""
        if self.is_loaded:
            return
        if self._stamps is None:
            raise ValueError("the weights were dropped for good; call reload_weights")
        if file_stamps(self._path) != self._stamps:
            raise ValueError("the checkpoint's files changed after they were loaded; call reload_weights to use them")
        self.model = self._load(self._path)

    def replace(self, path: Path) -> None:
        """Load the weights of another checkpoint of the same configuration. Raises ``ValueError`` naming the first
        difference, or what is wrong with the checkpoint; the old weights then stay."""
        ours = self.model.config
        theirs = load_model_config(path, self._dtype, ours.quantization)
        for field in dataclasses.fields(ModelConfig):
            old, new = getattr(ours, field.name), getattr(theirs, field.name)
            if old != new:
                raise ValueError(
                    f"{field.name} is {new} in the new checkpoint and {old} in the loaded one: not the same model"
                )
        stamps = file_stamps(path)
        self.model = self._load(path)
        self._path, self._stamps = path, stamps
