"""Masks of transformers, read back from their functions."""

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tokenloom.gpu_worker.models.transformers.paged_attention import (
    FunctionMask,
    MaskFunction,
    UnreadableMask,
    window_of,
)


@pytest.mark.parametrize(
    ("function", "length", "window"),
    [
        (causal_mask_function, 512, None),
        (causal_mask_function, 1, None),
        (sliding_window_causal_mask_function(24), 512, 24),
        (sliding_window_causal_mask_function(1), 512, 1),
        (sliding_window_causal_mask_function(400), 512, 400),
        (sliding_window_causal_mask_function(512), 512, None),
        (sliding_window_causal_mask_function(4096), 512, None),
    ],
)
def test_windows_are_read(function: MaskFunction, length: int, window: int | None) -> None:
    mask = FunctionMask.make(function, 2, 2)
    assert window_of(mask, length) == window
    assert window_of(mask[:, :, :, :1], length) == window


def only_even(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key % 2 == 0)


def by_kind_of_token(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.tensor([True, False])[key]


@pytest.mark.parametrize(
    "function", [chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)), only_even, by_kind_of_token]
)
def test_other_masks_are_not(function: MaskFunction) -> None:
    with pytest.raises(UnreadableMask):
        window_of(FunctionMask.make(function, 2, 2), 512)


def test_a_mask_that_was_changed_is_not() -> None:
    mask = FunctionMask.make(causal_mask_function, 2, 2)
    for changed in (mask + 1.0, mask.masked_fill(mask == 0, 1.0), torch.zeros(1, 1, 2, 2)):
        with pytest.raises(UnreadableMask):
            window_of(changed, 512)


def test_no_mask_is_causal_as_no_implementation_was_asked_for_one() -> None:
    assert window_of(None, 512) is None


def test_a_mask_of_later_tokens_reads_as_what_a_token_sees_before_it() -> None:
    """Attention to later tokens is refused by the module's own flag."""
    assert window_of(FunctionMask.make(bidirectional_mask_function, 2, 2), 512) is None
