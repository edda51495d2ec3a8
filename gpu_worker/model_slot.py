"""Holds the model of a worker, whose weights can be loaded, dropped and restored, or replaced."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from .attention.attention_backend import AttentionPlan, KVCache
from .attention.states import StatePlan
from .checkpoint.model_config import ModelConfig
from .checkpoint.weights import Checkpoint, FileStamps, check_unchanged, file_stamps
from .layers.embedding import InputEmbeds
from .layers.weight_memory import is_on_host, tensors_of
from .models.decoder import DecoderModel
from .models.load_model import ModelLoader
from .models.mlp import MLP
from .models.model import LanguageModel
from .models.self_check import CheckedModel


class OnHost:
    """Holds a model whose tensors were moved to host memory."""

    def __init__(self, model: LanguageModel) -> None:
        """Move every tensor of ``model`` to host memory that is not there; the model cannot compute until
        :meth:`restore`.

        Attributes:
            nbytes: Bytes of the tensors.
        """
        self._model = model
        self._moved = [(tensor, tensor.device) for tensor in tensors_of(model) if not is_on_host(tensor)]
        self.nbytes = sum(tensor.nbytes for tensor, _ in self._moved)
        for tensor, _ in self._moved:
            # Copying is quicker than reading a large checkpoint again, at the price of as much host memory. On a CPU
            # there is nothing to move: both levels of sleep drop the weights, and differ in which files may be loaded
            # again.
            tensor.data = torch.empty_like(tensor, device="cpu").copy_(tensor)

    def restore(self) -> LanguageModel:
        """Move the tensors back to where they were, and return the model."""
        for tensor, device in self._moved:
            tensor.data = tensor.to(device)
        return self._model


class AbsentModel:
    """Replaces a model whose weights were dropped."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def load_weights(self, checkpoint: Checkpoint) -> NoReturn:
        raise AssertionError("the weights are asleep")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
        states: StatePlan | None = None,
    ) -> NoReturn:
        raise AssertionError("the weights are asleep")

    def compute_logits(self, hidden: Tensor) -> NoReturn:
        raise AssertionError("the weights are asleep")


class WeightsLostError(Exception):
    """Raised when loading new weights failed after the old ones were dropped. Another :meth:`ModelSlot.replace`
    repairs it."""


class ModelSlot:
    """Holds one model of a fixed configuration."""

    def __init__(self, path: Path, loader: ModelLoader) -> None:
        """Load the checkpoint directory ``path``. Raises ``ValueError`` naming what is missing or not supported."""
        self.path = path
        """Where the weights are from."""
        self._loader = loader
        # Recorded before loading, so that a file that changes during the load is noticed later.
        self._stamps: FileStamps | None = file_stamps(path, loader.load_format)
        self.model: LanguageModel = loader.load(path)
        self._declared = self.model.declared if isinstance(self.model, CheckedModel) else self.model.config
        self._on_host: OnHost | None = None
        self._checked: tuple[Path, FileStamps] | None = None  # what :meth:`replace` may load

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.model, AbsentModel)

    @property
    def num_classes(self) -> int:
        """Return how many classes the head of the model has; 0: it has none."""
        head = self.model.head if isinstance(self.model, DecoderModel) else None
        return 0 if head is None else head.num_classes

    def embed_tokens(self) -> Callable[[Tensor], Tensor] | None:
        """Return what computes the states with which tokens begin, whichever weights are loaded then; None: they are
        not rows of one matrix times a factor, or another rank has them."""
        model = self.model
        if isinstance(model, CheckedModel):
            is_plain = model.has_plain_embeddings
        else:
            is_plain = isinstance(model, DecoderModel) and not model.config.traits.norms_embeddings
        return self._embed if is_plain and not model.config.first_layer else None

    def _embed(self, ids: Tensor) -> Tensor:
        assert isinstance(self.model, (DecoderModel, CheckedModel)), "the weights are asleep"
        return self.model.embed_tokens(ids)

    def drop(self, *, restorable: bool) -> None:
        """Drop the weights. Only :meth:`restore`, if ``restorable``, and :meth:`replace` bring them back."""
        self.model = AbsentModel(self.model.config)
        self._on_host = None
        if not restorable:
            self._stamps = None

    def move_to_host(self) -> int:
        """Move the weights to host memory, from which :meth:`restore` brings them back without reading files.

        Returns the size of the copy in bytes.
        """
        if self.is_loaded:
            self._on_host = OnHost(self.model)
            self.model = AbsentModel(self.model.config)
        return self._on_host.nbytes if self._on_host is not None else 0

    def restore(self) -> None:
        """Bring back the same weights, from host memory or from the files.

        Raises ``ValueError`` if the files changed or may not be loaded again.
        """
        if self.is_loaded:
            return
        if self._on_host is not None:
            self.model, self._on_host = self._on_host.restore(), None
            return
        check_unchanged(self.path, self._stamps, self._loader.load_format)
        self.model = self._loader.load(self.path)

    @contextmanager
    def read_again(self) -> Iterator[Checkpoint]:
        """Open the files of the loaded weights, whose tensors are read as float32 on the CPU, whatever part of them
        this rank has. Raises ``ValueError`` if they changed or may not be loaded again, or if there are none."""
        if self._loader.load_format == "dummy":
            raise ValueError("load_format is dummy: no files hold the model's own weights")
        check_unchanged(self.path, self._stamps, self._loader.load_format)
        config, cpu = self.model.config, torch.device("cpu")
        source = self._loader.source(self.path, config, cpu)
        with Checkpoint(self.path, torch.float32, cpu, config.scheme, source=source) as checkpoint:
            yield checkpoint

    def relocate_experts(self, held: Sequence[Mapping[int, MLP]]) -> None:
        """Load the experts that the model lacks in the places that this rank has now. ``held``: the others, as
        :func:`.models.decoder.relocate_experts`. Raises ``ValueError`` if the files have changed."""
        check_unchanged(self.path, self._stamps, self._loader.load_format)
        self._loader.relocate_experts(self.model, self.path, held)

    def check(self, path: Path) -> None:
        """Check that :meth:`replace` could load the checkpoint ``path``, without reading its tensors. Changes nothing.

        Raises ``ValueError`` naming the first difference, or what is wrong with the checkpoint.
        """
        self._checked = None
        if self._loader.load_format == "dummy":
            raise ValueError("load_format dummy: the weights are random and no files replace them; start without it")
        try:
            self._loader.read_config(path)  # its errors say more than a missing file
            # Before the files are compared: :meth:`replace` notices a later change.
            stamps = file_stamps(path, self._loader.load_format)
            self._compare(path)
        except OSError as error:
            raise ValueError(f"the checkpoint {path} cannot be read: {error}") from error
        self._checked = path, stamps

    def replace(self, path: Path) -> None:
        """Load the weights of another checkpoint of the same configuration, in the place of the old ones.

        Raises ``ValueError`` as :meth:`check`, if that was not called for these files before; the old weights then
        stay. Raises :class:`WeightsLostError` if reading fails later, or if the files have changed since they were
        checked: other ranks may have loaded those before. The model is then absent.
        """
        if self._checked is None or self._checked[0] != path:
            self.check(path)
        assert self._checked is not None
        (_, stamps), self._checked = self._checked, None
        with self.lost_on_error(path):
            if self.is_loaded:
                # Layer by layer: both copies of the weights took 164 MiB more for 136 MiB of float32, one layer at a
                # time takes 9. With int8-dynamic it is 42, because rounding makes several float32 copies of a matrix.
                self._loader.replace_weights(self.model, path)
            else:
                self._on_host = None
                self.model = self._loader.load(path)
            if file_stamps(path) != stamps:
                raise ValueError("the files changed after they were checked")
        self.path, self._stamps = path, stamps

    @contextmanager
    def lost_on_error(self, path: Path) -> Iterator[None]:
        """Drop the weights, of which the old ones are gone, if what makes those of ``path`` work fails. Raises
        :class:`WeightsLostError` then."""
        try:
            yield
        except BaseException as error:
            # vLLM would go on with half of each checkpoint. Without weights the engine stays paused and asleep until
            # another reload succeeds.
            self.drop(restorable=False)
            if not isinstance(error, Exception):
                raise
            raise WeightsLostError(
                f"loading {path} failed after the old weights were dropped ({type(error).__name__}: {error}); call "
                "reload_weights again"
            ) from error

    def _compare(self, path: Path) -> None:
        ours, theirs = self._declared, self._loader.read_config(path)
        for field in dataclasses.fields(ModelConfig):
            old, new = getattr(ours, field.name), getattr(theirs, field.name)
            if old != new:
                raise ValueError(
                    f"{field.name} is {new} in the new checkpoint and {old} in the loaded one: not the same model"
                )
        self._loader.check(path)
