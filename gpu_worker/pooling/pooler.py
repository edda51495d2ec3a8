"""Turns hidden states of prompts into vectors, classes and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.engine_core.data.config import WorkerConfig
from tokenloom.engine_core.data.core_params import CorePoolingParams, ModelPooling, PoolingTask

from .class_head import ClassHead, class_labels
from .sentence_files import PoolingType, Projection, SentenceFiles, project, read_matryoshka, read_sentence_files

_VECTORS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


class PromptStates:
    """Collects the hidden states of one prompt, chunk by chunk, as far as its pooling needs them."""

    def __init__(self, pooling: PoolingType | None) -> None:
        """``pooling``: None: the states of all tokens."""
        self._pooling = pooling
        self._chunks: list[Tensor] = []
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        """Add the states [n, hidden_size] of the next tokens."""
        self._count += len(hidden)
        match self._pooling:
            case "LAST":
                self._chunks = [hidden[-1].float()]
            case "CLS":
                self._chunks = self._chunks or [hidden[0].float()]
            case "MEAN":
                total = hidden.float().sum(0)
                self._chunks = [self._chunks[0] + total if self._chunks else total]
            case None:
                self._chunks.append(hidden.float())

    def pooled(self) -> Tensor:
        """Return the state of the prompt [hidden_size], or of its tokens [n, hidden_size], float32."""
        if self._pooling is None:
            return torch.cat(self._chunks)
        return self._chunks[0] / self._count if self._pooling == "MEAN" else self._chunks[0].clone()


@dataclass(frozen=True, slots=True)
class Pooler:
    """Holds how one model pools.

    Attributes:
        info: What requests may ask for.
        pooling: Whose state makes a vector.
    """

    info: ModelPooling
    pooling: PoolingType
    projections: Sequence[Projection]
    normalizes: bool
    head: ClassHead | None
    activates: bool

    def start(self, params: CorePoolingParams) -> PromptStates:
        """Return an empty collection for a prompt."""
        if params.task.is_by_token:
            return PromptStates(None)
        return PromptStates(self.pooling if params.task in _VECTORS or self.head is None else self.head.pooling)

    def finish(self, states: PromptStates, params: CorePoolingParams) -> npt.NDArray[np.float32]:
        """Return the result of a prompt, [], [n] or [tokens, n]."""
        x = states.pooled()
        result = self._vectors(x, params) if params.task in _VECTORS else self._classes(x, params)
        return result.contiguous().cpu().numpy()

    def _vectors(self, x: Tensor, params: CorePoolingParams) -> Tensor:
        x = project(x, self.projections)[..., : params.dimensions]
        normalizes = self.normalizes if params.use_activation is None else params.use_activation
        return F.normalize(x, dim=-1) if normalizes else x

    def _classes(self, x: Tensor, params: CorePoolingParams) -> Tensor:
        assert self.head is not None, "the core refuses tasks that the model does not have"
        logits = project(x, self.head.projections)
        activates = self.activates if params.use_activation is None else params.use_activation
        result = self.head.activation(logits) if activates else logits
        return result[..., 0] if params.task is PoolingTask.SCORE else result


def make_pooler(
    path: Path, config: WorkerConfig, hidden_size: int, head: ClassHead | None, *, is_encoder: bool
) -> Pooler | None:
    """Return how the checkpoint directory ``path`` is pooled, and None if it only generates.

    ``head``: None if the model has no classes. Raises ``ValueError`` naming what is wrong.
    """
    if config.runner == "generate":
        if head is not None or is_encoder:
            raise ValueError("runner is generate, but this model generates no text; choose auto or pooling")
        return None
    files, chosen = read_sentence_files(path), config.pooler_config
    generates = not is_encoder and head is None and config.runner != "pooling"
    if generates and files is None and chosen is None:
        return None
    files = files or SentenceFiles("CLS" if is_encoder else "LAST", (), True, *read_matryoshka(path))
    if chosen is not None:
        files = replace(
            files,
            pooling=chosen.pooling_type or files.pooling,
            normalizes=files.normalizes if chosen.normalize is None else chosen.normalize,
        )
    pooling = files.pooling or "MEAN"
    size = len(files.projections[-1].weight) if files.projections else hidden_size
    tasks = _tasks(head)
    info = ModelPooling(
        tasks,
        frozenset(task for task in tasks if task.is_by_token or _pooling_of(task, pooling, head) != "LAST"),
        generates=generates,
        is_encoder=is_encoder,
        matryoshka=files.matryoshka,
        dimensions=files.dimensions,
        vector_size=size,
        class_labels=() if head is None else class_labels(path),
    )
    activates = chosen is None or chosen.use_activation is not False
    return Pooler(info, pooling, files.projections, files.normalizes, head, activates)


def check_pooling(
    old: ModelPooling | None, path: Path, config: WorkerConfig, hidden_size: int, head: ClassHead | None
) -> None:
    """Check that the checkpoint directory ``path`` offers what the loaded one, with ``head``, does: ``old``.

    Raises ``ValueError`` naming what differs, or what is wrong: what requests may ask for is fixed at the start.
    """
    pooler = make_pooler(path, config, hidden_size, head, is_encoder=old is not None and old.is_encoder)
    old, new = old or ModelPooling(), ModelPooling() if pooler is None else pooler.info
    for name in ModelPooling.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name} of its pooling is {getattr(new, name)} in the new checkpoint and {getattr(old, name)} in the "
                "loaded one: not the same model"
            )


def _pooling_of(task: PoolingTask, pooling: PoolingType, head: ClassHead | None) -> PoolingType:
    return pooling if head is None or task in _VECTORS else head.pooling


def _tasks(head: ClassHead | None) -> tuple[PoolingTask, ...]:
    if head is None:
        return _VECTORS
    tasks = [PoolingTask.CLASSIFY]
    if head.num_classes == 1:
        tasks.append(PoolingTask.SCORE)
    if head.by_token:
        tasks.append(PoolingTask.TOKEN_CLASSIFY)
    return tuple(tasks)


Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class PooledPrompt:
    """Holds what a prompt asks for, and its states as far as they are computed."""

    params: CorePoolingParams
    num_tokens: int
    states: PromptStates | None = None


class PooledRows(dict[int, PooledPrompt]):
    """Holds the batch rows whose prompts are pooled. A step without such rows costs one dict lookup."""

    def pool(
        self, pooler: Pooler, rows: list[int], ends: list[int], cu_query_lens: list[int], hidden: Tensor
    ) -> dict[int, Floats]:
        """Add the states of a step. Returns the results of prompts that are complete, by index in the step.

        Args:
            rows: [R] the rows of the step.
            ends: [R] how many tokens of each are computed after the step.
            cu_query_lens: [R + 1] where the tokens of each begin.
            hidden: [T, hidden_size]
        """
        results = {}
        for index, row in enumerate(rows):
            if (prompt := self.get(row)) is None:
                continue
            if prompt.states is None:
                prompt.states = pooler.start(prompt.params)
            prompt.states.add(hidden[cu_query_lens[index] : cu_query_lens[index + 1]])
            if ends[index] == prompt.num_tokens:
                results[index] = pooler.finish(prompt.states, prompt.params)
        return results
