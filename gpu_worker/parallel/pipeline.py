"""Passes hidden states from stage to stage."""

import torch
from torch import Tensor

from ..call_recording.recorder import current_recorder
from .ranks import Ranks


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
        shape, recorder = (num_tokens, self._hidden_size), current_recorder()
        if recorder is None:
            return self._peers.receive(shape, self._dtype, self._before)
        hidden = torch.empty(shape, dtype=self._dtype)
        recorder.exchange(self._receive_into, hidden, reads=False, writes=True)
        return hidden

    def send(self, hidden: Tensor) -> Tensor:
        """Send the hidden states [T, hidden_size] to the stage behind, and return them. Nothing may change them any
        more."""
        assert self._peers is not None, "one stage computes all layers"
        if (recorder := current_recorder()) is None:
            self._peers.send(hidden, self._behind)
        else:
            recorder.exchange(self._send_copy, hidden, reads=True, writes=False)
        return hidden

    def _receive_into(self, hidden: Tensor) -> None:
        assert self._peers is not None
        hidden.copy_(self._peers.receive(hidden.shape, hidden.dtype, self._before))

    def _send_copy(self, hidden: Tensor) -> None:
        """Send the content of memory in which the next step is computed while the transfer may still read."""
        assert self._peers is not None
        self._peers.send(hidden.clone(), self._behind)
