"""Compares a model over the paged KV cache with the same modules' own attention, before the first request.

The classes of transformers are many and change with its versions: one that computes part of its attention by itself
would answer nonsense without an error.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import StateRun

from ..attention.attention_backend import AttentionBackend, KVCache
from ..attention.states import FROM_ZERO, StatePlan, StateSlots
from ..checkpoint.model_config import ModelConfig
from .model import LanguageModel

# Two rows of 40 and 13 tokens, so that chunks, decodes and both together are met, and a block is left unfinished
# between steps.
_STEPS = ((16, 0), (7, 9), (0, 1), (1, 1), (13, 0), (1, 1), (1, 0), (1, 1))
"""Tokens of the two rows in each step: prompts in chunks and decoding, separately and together."""
_TAILS = ((7, 0), (1, 2), (1, 1), (0, 1))
"""The same behind the first chunk of each row, if the model keeps states, whose prompts are cut at whole chunks."""
_TOLERANCE = {torch.float32: 1e-4}
_ROUNDED_TOLERANCE = 5e-2
"""The relative error of logits that bfloat16, or a product in int8, may cause: 3.3e-2 was seen with random weights."""
# Small random models of Gemma 4 have 6e-2 to 2e-1 in bfloat16, between eager and sdpa attention of transformers too.
_MOST_ROUNDED = 2.0
"""How many times the error between two ways of the modules' own to attend theirs may be, where that is more."""
_ROUNDED_TAIL = 0.9
"""The share of tokens within the larger errors between those two ways."""
_ROUNDED_SHARE = 0.75
"""The share of tokens within that tolerance. Rounding can send a token to another expert, which changes its logits."""


@runtime_checkable
class CheckedModel(LanguageModel, Protocol):
    """A model that can also be computed without the paged cache."""

    architecture: str
    library: str
    """The library whose modules compute it, with its version."""
    declared: ModelConfig
    """What the checkpoint's configuration says by itself; ``config`` is what the modules were found to compute."""

    def compute_eagerly(self, input_ids: Tensor, positions: Tensor | None = None, attention: str = "eager") -> Tensor:
        """Compute the logits [T, vocab_size] of one sequence [T] without the paged cache.

        ``positions`` [T]: None leaves the numbering of positions to the model, as those who call it do. ``attention``:
        ``eager``, or ``sdpa``, which rounds in another order.
        """

    @property
    def has_plain_embeddings(self) -> bool:
        """Whether tokens begin with rows of the matrix ``model.embed_tokens``, and with nothing else."""

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of tokens [T]."""

    @property
    def num_attention_calls(self) -> int:
        """How often the last forward pass attended."""


@torch.inference_mode()
def check_model(
    model: CheckedModel, backend: AttentionBackend, block_size: int, device: torch.device, *, has_stages: bool = False
) -> None:
    """Raise ``ValueError`` naming the architecture if paged attention gives other logits than the modules' own.
    ``has_stages``: other ranks compute the layers before these or behind them at the same time."""
    generator = torch.Generator().manual_seed(0)
    steps = _steps(model.config)
    lengths = [sum(step[row] for step in steps) for row in range(2)]
    limit = min(model.config.vocab_size, 1 << 15)
    rows = [torch.randint(0, limit, (length,), generator=generator).to(device) for length in lengths]
    try:
        expected = torch.cat([model.compute_eagerly(row) for row in rows])
        found = torch.cat(_compute_paged(model, backend, block_size, rows))
    except Exception as error:  # a module may fail in any way
        raise _refusal(model, f"fails in the self-check ({type(error).__name__}: {error})") from error
    if not bool(torch.isfinite(found).all() and torch.isfinite(expected).all()):
        raise _refusal(model, "computes logits that are not finite")
    difference, tolerance = _error(model, expected, found)
    if has_stages and difference > tolerance:  # another pass, which the other stages do not make, would wait for them
        raise _refusal(model, _difference(difference, tolerance))
    if difference > tolerance and not _is_rounding(model, rows, expected, found):
        raise _refusal(model, _cause(model, rows, found) or _difference(difference, tolerance))


def _errors(expected: Tensor, found: Tensor) -> Tensor:
    """Return the relative error of each token's logits, [T]."""
    errors: Tensor = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    return errors


def _error(model: CheckedModel, expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the relative error of logits [T, vocab_size], and the largest that rounding may cause."""
    errors = _errors(expected, found)
    if model.config.dtype in _TOLERANCE and model.config.quantization is None:
        return float(errors.max()), _TOLERANCE[model.config.dtype]
    return float(errors.quantile(_ROUNDED_SHARE)), _ROUNDED_TOLERANCE


def _is_rounding(model: CheckedModel, rows: list[Tensor], expected: Tensor, found: Tensor) -> bool:
    """Return whether the modules' own logits differ as much with another order of rounding. In float32 there is hardly
    any."""
    if model.config.dtype in _TOLERANCE and model.config.quantization is None:
        return False
    try:
        rounded = torch.cat([model.compute_eagerly(row, attention="sdpa") for row in rows])
    except Exception:  # a module may fail in any way, and may have one way to attend only
        return False
    errors, own = _errors(expected, found), _errors(expected, rounded)
    # Most tokens differ little. A few go to other experts, and differ by ten times that: which ones is chance.
    is_usual = errors.median() <= _MOST_ROUNDED * own.median()
    return bool(is_usual and errors.quantile(_ROUNDED_SHARE) <= _MOST_ROUNDED * own.quantile(_ROUNDED_TAIL))


def _cause(model: CheckedModel, rows: list[Tensor], found: Tensor) -> str:
    """Return what makes the logits differ, if it is the positions; otherwise an empty text."""
    try:
        positions = [torch.arange(len(row), device=row.device) for row in rows]
        counted = torch.cat([model.compute_eagerly(*pair) for pair in zip(rows, positions, strict=True)])
    except Exception:  # a module may fail in any way
        return ""
    error, tolerance = _error(model, counted, found)
    if error > tolerance:
        return ""
    return "numbers positions in its own way, for example from padding_idx + 1 on, instead of from 0 on"


def _difference(error: float, tolerance: float) -> str:
    return (
        f"has logits over the paged KV cache that differ from transformers' own by {error:.1e}, more than "
        f"{tolerance:g}: some of what it computes between tokens does not pass through transformers' attention "
        "interface"
    )


def _refusal(model: CheckedModel, reason: str) -> ValueError:
    return ValueError(f"config.json: {model.architecture} is not supported: it {reason}")


def _steps(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return how many tokens of the two rows each step computes."""
    if config.states is None:
        return _STEPS
    chunk = max(config.states.chunk, _STEPS[0][0])
    return ((chunk, 0), (_TAILS[0][0], chunk), *_TAILS[1:])


def _compute_paged(model: CheckedModel, backend: AttentionBackend, block_size: int, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits of each row's tokens, computed in steps, over scattered blocks and slots."""
    width = max(-(-len(row) // block_size) for row in rows)
    tables = np.arange(len(rows) * width).reshape(width, len(rows)).T[:, ::-1].copy()
    caches = backend.allocate(tables.size)
    done = [0] * len(rows)
    logits: list[list[Tensor]] = [[] for _ in rows]
    slots = StateSlots(model.config, 2 * len(rows), rows[0].device)
    slots.allocate()
    for number, step in enumerate(_steps(model.config)):
        members = [row for row, count in enumerate(step) if count]
        parts = _compute_step(
            model,
            backend,
            block_size,
            caches,
            tables[members],
            [rows[i] for i in members],
            [(done[i], done[i] + step[i]) for i in members],
            slots.plan([_run(i, done[i], step[i], number) for i in members]) if slots.layers else None,
        )
        for row, part in zip(members, parts, strict=True):
            logits[row].append(part)
            done[row] += step[row]
    return [torch.cat(parts) for parts in logits]


def _run(row: int, done: int, count: int, number: int) -> StateRun:
    """Return the run of ``count`` tokens behind ``done`` ones of a row, in step ``number``: each of a row's steps reads
    one of its two slots and writes the other one."""
    slots = 2 * row + (number + 1) % 2, 2 * row + number % 2
    return StateRun(str(row), count, slots[0] if done else FROM_ZERO, slots[1])


def _compute_step(
    model: CheckedModel,
    backend: AttentionBackend,
    block_size: int,
    caches: list[KVCache],
    tables: npt.NDArray[np.int64],
    rows: list[Tensor],
    spans: list[tuple[int, int]],
    states: StatePlan | None,
) -> list[Tensor]:
    """Return the logits of the tokens ``spans`` (begin, end) of each row."""
    positions = [np.arange(begin, end) for begin, end in spans]
    slots = [
        table[at // block_size] * block_size + at % block_size for table, at in zip(tables, positions, strict=True)
    ]
    cu_query_lens = np.cumsum([0] + [end - begin for begin, end in spans])
    plan = backend.plan(cu_query_lens, np.array([end for _, end in spans]), tables, np.concatenate(slots))
    device = rows[0].device
    ids = torch.cat([row[begin:end] for row, (begin, end) in zip(rows, spans, strict=True)])
    places = torch.from_numpy(np.concatenate(positions)).to(device)
    hidden = model.forward(ids, places, caches, plan, (), states)
    if model.num_attention_calls != model.config.num_layers and model.num_attention_calls:
        raise RuntimeError(f"{model.num_attention_calls} of {model.config.num_layers} layers attended")
    return list(torch.split(model.compute_logits(hidden), [end - begin for begin, end in spans]))
