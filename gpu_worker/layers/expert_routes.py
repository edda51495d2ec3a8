"""Records which experts the routers of a model choose."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..parallel.experts.grouped_rows import GroupedRows

Ints = npt.NDArray[np.int64]


class LayerRoutes:
    """Records the choices of one layer's router."""

    def __init__(self, routes: "ExpertRoutes", number: int, num_experts: int) -> None:
        """``number``: of the layer, among those with experts."""
        self.number = number
        self._routes = routes
        # The last place counts a number above those of the experts, which some routers use for no expert.
        self._counts: Ints = np.zeros(num_experts + 1, dtype=np.int64)
        self._on_device: Tensor | None = None  # as _counts, of passes whose choices never came to the host
        self.chosen: Tensor | None = None

    @property
    def num_tokens(self) -> Ints:
        """Return the tokens that each expert computed in recorded passes, [num_experts]. Waits for the device."""
        counted = self._counts[:-1]
        return counted if self._on_device is None else counted + self._on_device[:-1].cpu().numpy()

    def add(self, counts: Ints) -> None:
        """Add tokens that each expert computed elsewhere, [num_experts]."""
        self._counts[:-1] += counts

    def record(self, chosen: Tensor, grouped: GroupedRows) -> None:
        """Note the experts of a forward pass, ``chosen`` [T, top_k], if the pass is recorded."""
        if self._routes.is_recording:
            self._counts[grouped.experts] += grouped.counts
            if self._routes.keeps_choices:
                self.chosen = chosen

    def record_on_device(self, chosen: Tensor) -> None:
        """Do what :meth:`record` does without waiting for the choices."""
        if self._routes.is_recording:
            if self._on_device is None:
                self._on_device = torch.zeros(len(self._counts), dtype=torch.int64, device=chosen.device)
            flat = chosen.flatten()
            self._on_device.scatter_add_(0, flat, torch.ones_like(flat))
            if self._routes.keeps_choices:
                self.chosen = chosen


class ExpertRoutes:
    """Records the choices of all layers that have experts, in the model's order."""

    def __init__(self, num_experts: int, top_k: int, num_layers: int) -> None:
        """``top_k``: experts of a token in each layer. A layer's :class:`LayerRoutes` are at ``layers[i]``."""
        self.num_experts = num_experts
        self.top_k = top_k
        self.is_recording = False
        self.keeps_choices = False
        self.num_layers = num_layers
        """How many layers have experts."""
        self.layers = [LayerRoutes(self, number, num_experts) for number in range(num_layers)]

    def begin(self, *, keep_choices: bool) -> None:
        """Record the next forward pass: how many tokens each expert computes, and with ``keep_choices`` which."""
        self.is_recording, self.keeps_choices = True, keep_choices

    def end(self) -> npt.NDArray[np.unsignedinteger] | None:
        """End the pass. Returns the experts of each token, [T, num_layers, top_k], if the pass kept them.

        The dtype is uint8 for up to 256 experts, otherwise uint16.
        """
        self.is_recording = False
        if not self.keeps_choices:
            return None
        kept = [layer.chosen for layer in self.layers if layer.chosen is not None]
        for layer in self.layers:
            layer.chosen = None
        stacked = torch.stack(kept, 1).cpu().numpy()
        return stacked.astype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def counts(self) -> Ints:
        """Return the tokens that each expert computed, [num_layers, num_experts]."""
        return np.stack([layer.num_tokens for layer in self.layers])

    def add(self, counts: Ints) -> None:
        """Add the tokens of passes that other ranks computed, [num_layers, num_experts]."""
        for layer, count in zip(self.layers, counts, strict=True):
            layer.add(count)

    def loads(self) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Return the tokens that each expert computed, over all layers, [num_experts]; and for each layer the most that
        one expert computed, divided by the mean of all its experts, [num_layers], 0 if it computed none."""
        # Summed over layers: a series for each expert of each layer would be thousands for one engine. The gauge by
        # layer keeps what the sum hides.
        counts = self.counts()
        means = counts.mean(1)
        balance = np.divide(counts.max(1), means, out=np.zeros_like(means), where=means > 0)
        return counts.sum(0), balance
