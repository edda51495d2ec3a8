"""Pools for the hash worker: each number is a hash of the tokens and positions in the cache."""

import hashlib

import numpy as np
import numpy.typing as npt

from ..data.core_pooling_params import ModelPooling, PoolingParams, PoolingTask

Floats = npt.NDArray[np.float32]
NUM_CLASSES = 2
_NUM_COLUMNS = 8


def hash_pooling(*, generates: bool) -> ModelPooling:
    """Return what the hash worker pools: everything."""
    by_token = frozenset(task for task in PoolingTask if task.is_by_token)
    return ModelPooling(tuple(PoolingTask), by_token, generates=generates, matryoshka=True, vector_size=_NUM_COLUMNS)


def hash_pooled(prefix: npt.NDArray[np.int32], params: PoolingParams) -> Floats:
    """Pool ``prefix`` [n, 2], which holds token ids and positions: a task by token hashes each row, others all rows."""
    is_vector = params.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    if params.task.is_by_token:
        logits = np.stack([_numbers(row) for row in prefix])
    else:
        logits = _numbers(prefix)
    if is_vector:
        return _activate_vector(logits[..., : params.dimensions], params)
    if params.task is PoolingTask.SCORE:
        score = logits[..., 0]
        return np.asarray(score if params.use_activation is False else 1 / (1 + np.exp(-score)), dtype=np.float32)
    classes: Floats = logits[..., :NUM_CLASSES]
    if params.use_activation is not False:
        classes = np.exp(classes)
        classes /= classes.sum(-1, keepdims=True)
    return classes


def _activate_vector(vectors: Floats, params: PoolingParams) -> Floats:
    if params.use_activation is False:
        return vectors
    normalized: Floats = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return normalized


def _numbers(rows: npt.NDArray[np.int32]) -> Floats:
    """Return [8] numbers in [-1, 1)."""
    digest = hashlib.blake2b(np.ascontiguousarray(rows, dtype="<i4").tobytes(), digest_size=4 * _NUM_COLUMNS).digest()
    return (np.frombuffer(digest, "<u4") / 2.0**31 - 1).astype(np.float32)
