"""Turns hidden states of prompts into vectors, classes and scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.config import WorkerConfig
from tokenloom.engine_core.data.core_params import CorePoolingParams, ModelPooling, PoolingTask
from tokenloom.model_files.sentence_texts import read_sentence_texts

from ..checkpoint.load_config import num_classes
from .class_head import ClassHead, class_labels
from .sentence_files import (
    PoolingType,
    SentenceFiles,
    VectorStep,
    apply_steps,
    check_sizes,
    read_matryoshka,
    read_sentence_files,
    unit_length,
)

_VECTORS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


class PromptStates:
    """Collects the hidden states of one prompt, chunk by chunk, as far as its pooling needs them."""

    def __init__(self, modes: Sequence[PoolingType] | None, skipped: int = 0) -> None:
        """``modes``: whose states are joined; None: the states of all tokens. ``skipped``: so many tokens at the
        begin of the prompt take no part."""
        self._modes = modes
        # The prefix cache may hold the begin of a prompt whose last state alone counts.
        self._skipped = 0 if modes == ("LAST",) else skipped
        self._chunks: list[Tensor] = []
        self._parts: dict[PoolingType, Tensor] = {}
        self._size = self._count = self._weight = 0

    def add(self, hidden: Tensor) -> None:
        """Add the states [n, hidden_size] of the next tokens."""
        self._size = hidden.shape[-1]
        if self._modes is None:
            self._chunks.append(hidden.float())
            return
        passed = min(self._skipped, len(hidden))
        self._skipped -= passed
        self._weight += passed
        if passed < len(hidden):
            for mode in self._modes:
                self._add(mode, hidden[passed:])
            self._count += len(hidden) - passed
            self._weight += len(hidden) - passed

    def _add(self, mode: PoolingType, hidden: Tensor) -> None:
        old = self._parts.get(mode)
        match mode:
            case "LAST":
                new = hidden[-1].float()
            case "CLS":
                new = hidden[0].float() if old is None else old
            case "MAX":
                new = hidden.float().amax(0)
                new = new if old is None else torch.maximum(old, new)
            case "MEAN" | "MEAN_SQRT":
                new = hidden.float().sum(0) + (0 if old is None else old)
            case "WEIGHTED_MEAN":
                # A token weighs as much as its position, counted from 1, skipped tokens included.
                weights = torch.arange(self._weight + 1, self._weight + len(hidden) + 1, device=hidden.device)
                new = (hidden.float() * weights[:, None]).sum(0) + (0 if old is None else old)
        self._parts[mode] = new

    def pooled(self) -> Tensor:
        """Return the state of the prompt [modes * hidden_size], or of its tokens [n, hidden_size], float32."""
        if self._modes is None:
            return torch.cat(self._chunks)
        return torch.cat([self._pooled(mode) for mode in self._modes])

    def _pooled(self, mode: PoolingType) -> Tensor:
        if not self._count:
            return torch.zeros(self._size)
        part = self._parts[mode]
        first = self._weight - self._count
        divisors = {
            "MEAN": self._count,
            "MEAN_SQRT": math.sqrt(self._count),
            "WEIGHTED_MEAN": (self._weight * (self._weight + 1) - first * (first + 1)) / 2,
        }
        return part / divisors[mode] if mode in divisors else part.clone()


@dataclass(frozen=True, slots=True)
class Pooler:
    """Holds how one model pools.

    Attributes:
        info: What requests may ask for.
        poolings: Whose states make a vector.
        steps: What is applied to it.
        normalizes: Whether it gets length 1 after that.
    """

    info: ModelPooling
    poolings: tuple[PoolingType, ...]
    steps: Sequence[VectorStep]
    normalizes: bool
    head: ClassHead | None
    activates: bool

    def start(self, params: CorePoolingParams) -> PromptStates:
        """Return an empty collection for a prompt."""
        if params.task.is_by_token:
            return PromptStates(None)
        return PromptStates(_poolings_of(params.task, self.poolings, self.head), params.skipped_tokens)

    def finish(self, states: PromptStates, params: CorePoolingParams) -> npt.NDArray[np.float32]:
        """Return the result of a prompt, [], [n] or [tokens, n]."""
        x = states.pooled()
        result = self._vectors(x, params) if params.task in _VECTORS else self._classes(x, params)
        return result.contiguous().cpu().numpy()

    def with_class_weight(self, change: Callable[[Tensor], Tensor]) -> "Pooler":
        """Return the same pooler with another weight of the class head, which ``change`` makes of the model's own
        [classes, hidden_size]."""
        assert self.head is not None, "only models with a class head have such adapters"
        (own,) = self.head.projections
        return replace(self, head=replace(self.head, projections=(replace(own, weight=change(own.weight)),)))

    def _vectors(self, x: Tensor, params: CorePoolingParams) -> Tensor:
        # Of length 1 after the cut: the vector of a model that normalizes has length 1 whatever it was cut to.
        x = apply_steps(x.cpu(), self.steps)[..., : params.dimensions]
        normalizes = self.normalizes if params.use_activation is None else params.use_activation
        return unit_length(x) if normalizes else x

    def _classes(self, x: Tensor, params: CorePoolingParams) -> Tensor:
        assert self.head is not None, "the core refuses tasks that the model does not have"
        logits = apply_steps(x, self.head.projections)
        activates = self.activates if params.use_activation is None else params.use_activation
        result = self.head.activation(logits) if activates else logits
        return result[..., 0] if params.task is PoolingTask.SCORE else result


def make_pooler(
    path: Path,
    config: WorkerConfig,
    hidden_size: int,
    head: ClassHead | None,
    *,
    is_encoder: bool,
    has_output: bool = True,
) -> Pooler | None:
    """Return how the checkpoint directory ``path`` is pooled, and None if it only generates.

    ``head``: None if the model has no classes. ``has_output``: whether a decoder has an output layer. Raises
    ``ValueError`` naming what is wrong.
    """
    can_generate = head is None and has_output and not is_encoder
    if config.runner == "generate":
        if not can_generate:
            raise ValueError("runner is generate, but this model generates no text; choose auto or pooling")
        return None
    files, chosen = read_sentence_files(path), config.pooler_config
    generates = can_generate and config.runner != "pooling"
    if generates and files is None and chosen is None:
        return None
    files = files or SentenceFiles(("CLS" if is_encoder else "LAST",), (), True, None, *read_matryoshka(path))
    if chosen is not None:
        files = replace(
            files,
            poolings=files.poolings if chosen.pooling_type is None else (chosen.pooling_type,),
            normalizes=files.normalizes if chosen.normalize is None else chosen.normalize,
        )
    if head is None:
        check_sizes(files.steps, hidden_size * len(files.poolings))
    tasks = _tasks(head, files)
    info = ModelPooling(
        tasks,
        frozenset(task for task in tasks if task.is_by_token or _poolings_of(task, files.poolings, head) != ("LAST",)),
        generates=generates,
        is_encoder=is_encoder,
        matryoshka=files.matryoshka,
        dimensions=files.dimensions,
        vector_size=files.size or hidden_size * len(files.poolings),
        class_labels=() if head is None else class_labels(path),
        text_rules=str(read_sentence_texts(path) or ""),
    )
    activates = chosen is None or chosen.use_activation is not False
    return Pooler(info, files.poolings, files.steps, files.normalizes, head, activates)


def check_pooling(
    old: ModelPooling | None,
    path: Path,
    config: WorkerConfig,
    hidden_size: int,
    head: ClassHead | None,
    has_output: bool = True,
) -> None:
    """Check that the checkpoint directory ``path`` offers what the loaded one, with ``head``, does: ``old``.

    Raises ``ValueError`` naming what differs, or what is wrong: what requests may ask for is fixed at the start.
    """
    is_encoder = old is not None and old.is_encoder
    # Without names, which are compared below, only the head's own size says how many numbers a result has.
    if head is not None and (count := num_classes(path)) != head.num_classes:
        raise ValueError(
            f"the new checkpoint has {count} classes, and the loaded one {head.num_classes}: not the same model"
        )
    pooler = make_pooler(path, config, hidden_size, head, is_encoder=is_encoder, has_output=has_output)
    old, new = old or ModelPooling(), ModelPooling() if pooler is None else pooler.info
    for name in ModelPooling.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name} of its pooling is {getattr(new, name)} in the new checkpoint and {getattr(old, name)} in the "
                "loaded one: not the same model"
            )


def _poolings_of(
    task: PoolingTask, poolings: tuple[PoolingType, ...], head: ClassHead | None
) -> tuple[PoolingType, ...]:
    return poolings if head is None or task in _VECTORS else (head.pooling,)


def _tasks(head: ClassHead | None, files: SentenceFiles) -> tuple[PoolingTask, ...]:
    if head is None:
        # The state of one token is too short for layers that follow several poolings: such a request, which once
        # failed the step, would end the engine.
        return (PoolingTask.EMBED,) if files.steps and len(files.poolings) > 1 else _VECTORS
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
        self,
        pooler: Pooler,
        rows: list[int],
        ends: list[int],
        cu_query_lens: list[int],
        hidden: Tensor,
        attended: Mapping[int, Sequence[Tensor]] = MappingProxyType({}),
        poolers: Mapping[int, Pooler] = MappingProxyType({}),
    ) -> dict[int, Floats]:
        """Add the states of a step. Returns the results of prompts that are complete, by index in the step.

        Args:
            rows: [R] the rows of the step.
            ends: [R] how many tokens of each are computed after the step.
            cu_query_lens: [R + 1] where the tokens of each begin.
            hidden: [T, hidden_size]
            attended: By index in the step, weights that take the place of the states: see ``StepCross``.
            poolers: By row, what pools it in the place of ``pooler``.
        """
        results = {}
        for index, row in enumerate(rows):
            if (prompt := self.get(row)) is None:
                continue
            if prompt.states is None:
                prompt.states = pooler.start(prompt.params)
            if index in attended:
                prompt.states.add(torch.cat(list(attended[index])))
            else:
                prompt.states.add(hidden[cu_query_lens[index] : cu_query_lens[index + 1]])
            if ends[index] == prompt.num_tokens:
                results[index] = poolers.get(row, pooler).finish(prompt.states, prompt.params)
        return results
