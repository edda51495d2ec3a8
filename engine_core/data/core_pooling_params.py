"""Defines the parameters of pooling requests as the engine receives them, and what a model can pool."""

import enum

import msgspec


class PoolingTask(enum.IntEnum):
    """Names what a pooling request returns (numbers as in ``types.proto``, names in lower case as in vLLM)."""

    EMBED = 1
    """One vector for the prompt."""
    CLASSIFY = 2
    """One probability for each class of the model's head."""
    SCORE = 3
    """One number: the relevance of a document to a query, by a model that reads both at once."""
    TOKEN_EMBED = 4
    """One vector for each token of the prompt."""
    TOKEN_CLASSIFY = 5
    """The probabilities of the classes for each token of the prompt."""

    @property
    def is_by_token(self) -> bool:
        """Whether the result has a row for each token."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


class LateInteraction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scores documents against the token vectors of a query, which the engine core keeps."""

    query_id: str
    num_documents: int = 0
    """With the query itself: how many documents follow it. 0: this request is a document."""


class CorePoolingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Controls what is computed from a prompt instead of generating tokens."""

    task: PoolingTask
    dimensions: int | None = None
    """How many of the first numbers of each vector to keep (Matryoshka); None: all."""
    use_activation: bool | None = None
    """Whether vectors are normalized to length 1, and logits become probabilities; None: as the model says."""
    first_part_tokens: int = 0
    """Tokens of the prompt's first part, which have token type 0, and those after it 1; 0: all have type 0."""
    late_interaction: LateInteraction | None = None
    """Only with ``TOKEN_EMBED``: the vectors stay in the core."""


class ModelPooling(msgspec.Struct, frozen=True):
    """Describes what a model can pool."""

    tasks: tuple[PoolingTask, ...] = ()
    whole_prompt: frozenset[PoolingTask] = frozenset()
    """Tasks that read the hidden states of all tokens of the prompt, so that none may come from the prefix cache."""
    generates: bool = True
    """Whether the model generates tokens."""
    is_encoder: bool = False
    """Whether each token attends to all tokens of the prompt: a step computes whole prompts, and no KV is kept."""
    matryoshka: bool = False
    """Whether requests may set ``dimensions``."""
    dimensions: tuple[int, ...] = ()
    """The values that they may have; empty: any up to ``vector_size``."""
    vector_size: int = 0
    """Numbers of a vector."""
    class_labels: tuple[str, ...] = ()
    """The names of the classes, in order; empty if the checkpoint does not name them."""
