"""Passes hidden states from stage to stage."""

import torch
from torch import Tensor

from .group import Ranks


class Stage:
    """Joins the layers of this rank to those of the stages before and after it."""

    def __init__(self, ranks: Ranks, hidden_size: int, dtype: torch.dtype) -> None:
        place = ranks.place
        self._peers = ranks.tensors
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._before = place.tensor_size * (place.stage - 1) + place.tensor_rank
        self._behind = place.tensor_size * (place.stage + 1) + place.tensor_rank

    def receive(self, num_tokens: int) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] that the stage before has computed."""
        assert self._peers is not None, "one stage computes all layers"
        return self._peers.receive((num_tokens, self._hidden_size), self._dtype, self._before)

    def send(self, hidden: Tensor) -> Tensor:
        """Send the hidden states [T, hidden_size] to the stage behind, and return them. Nothing may change them any
        more."""
        assert self._peers is not None, "one stage computes all layers"
        self._peers.send(hidden, self._behind)
        return hidden
