"""Records which experts the routers of a model choose."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..device.device_link import DeviceLink, Event, link_of
from ..parallel.experts.grouped_rows import GroupedRows

Ints = npt.NDArray[np.int64]
_FETCH_EVERY = 32
"""Steps between two copies of a device's counts to the host: one in each step was a copy for each layer with experts,
and a wait for each of them."""
_ALL = (1 << 31) - 1


class DeviceCounts:
    """Counts on a device which experts compute how many tokens, for all layers in one tensor. Belongs to one thread."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device, link: DeviceLink | None = None) -> None:
        """``link`` brings the counts to the host; None: as the device does."""
        # Even, so that the counts of every layer begin at an address that 16 divides; one more for no expert.
        width = num_experts + 1 + (num_experts + 1) % 2
        self.counts = torch.zeros(2, num_layers, width, dtype=torch.int64, device=device)
        """[of passes that are recorded and of others, layers, experts and more]"""
        self.all_tokens = torch.full((1,), _ALL, dtype=torch.int32, device=device)
        """[1]: more tokens than any step has."""
        self._num_experts = num_experts
        self._link = link or link_of(device)
        self._is_near = link is None and device.type == "cpu"
        self._arriving: Ints = np.zeros((0, 0), dtype=np.int64)
        self._fetched: Event | None = None  # None: nothing is on its way
        self._latest: Ints = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._num_calls = 0

    def exact(self) -> Ints:
        """Return the counts [layers, experts] of recorded passes. Waits for the device."""
        counted: Ints = self.counts[0, :, : self._num_experts].cpu().numpy()
        return counted

    def latest(self) -> Ints:
        """Return the counts that came to the host last. Called once a step; some of its calls order the next ones."""
        if self._is_near:
            return self.exact()
        if self._fetched is not None and self._fetched.query():
            self._latest, self._fetched = self._arriving[:, : self._num_experts], None
        if self._fetched is None and self._num_calls % _FETCH_EVERY == 0:
            own = self.counts[0]
            target = self._link.host_memory(own.nbytes).view(own.dtype).view(own.shape)
            self._link.fetch(target, own)
            # As an array: a model that sleeps moves all tensors that its parts hold.
            self._arriving, self._fetched = target.numpy(), self._link.event()
        self._num_calls += 1
        return self._latest


class LayerRoutes:
    """Records the choices of one layer's router."""

    def __init__(self, routes: "ExpertRoutes", number: int, num_experts: int) -> None:
        """``number``: of the layer, among those with experts."""
        self.number = number
        self._routes = routes
        # The last place counts a number above those of the experts, which some routers use for no expert.
        self._counts: Ints = np.zeros(num_experts + 1, dtype=np.int64)
        self.chosen: Tensor | None = None
        self.stays_on_device = False
        """Whether the host never waits for the choices: kernels sort the tokens by their experts."""

    @property
    def on_host(self) -> Ints:
        """Return the tokens that each expert computed in recorded passes whose choices came to the host,
        [num_experts]."""
        return self._counts[:-1]

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
            flat = chosen.flatten()
            self.places(chosen)[0].scatter_add_(0, flat, torch.ones_like(flat))

    def places(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a kernel that computes the experts ``chosen`` [T, top_k] counts their tokens, int64 with a place
        for each expert, and how many of the tokens are real, [1] int32; note the choices, if the pass keeps them."""
        routes = self._routes
        held = routes.on(chosen.device)
        if routes.is_recording and routes.keeps_choices:
            self.chosen = chosen
        num_real = held.all_tokens if routes.num_real is None else routes.num_real
        return held.counts[0 if routes.is_recording else 1, self.number], num_real


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
        self.num_real: Tensor | None = None
        """[1] int32 on the device: how many tokens of the pass are not padding; None: all."""
        self._on_device: DeviceCounts | None = None
        self.layers = [LayerRoutes(self, number, num_experts) for number in range(num_layers)]

    @property
    def stay_on_device(self) -> bool:
        """Whether the host waits for no layer's choices, so that graphs of a GPU can hold all of them."""
        return all(layer.stays_on_device for layer in self.layers)

    def on(self, device: torch.device) -> DeviceCounts:
        """Return the counts of passes whose choices do not come to the host."""
        if self._on_device is None:
            self._on_device = DeviceCounts(self.num_layers, self.num_experts, device)
        return self._on_device

    @torch.inference_mode()
    def forget_device_counts(self) -> None:
        """Count on the device from zero: the graphs that a warm-up replays count its tokens as those of requests."""
        if self._on_device is not None:
            self._on_device.counts.zero_()

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
        """Return the tokens that each expert computed, [num_layers, num_experts]. Waits for the device."""
        on_host = np.stack([layer.on_host for layer in self.layers])
        return on_host if self._on_device is None else on_host + self._on_device.exact()

    def add(self, counts: Ints) -> None:
        """Add the tokens of passes that other ranks computed, [num_layers, num_experts]."""
        for layer, count in zip(self.layers, counts, strict=True):
            layer.add(count)

    def loads(self) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Return the tokens that each expert computed, over all layers, [num_experts]; and for each layer the most that
        one expert computed, divided by the mean of all its experts, [num_layers], 0 if it computed none. Those that a
        GPU counts are some steps old."""
        # Summed over layers: a series for each expert of each layer would be thousands for one engine. The gauge by
        # layer keeps what the sum hides.
        counts = np.stack([layer.on_host for layer in self.layers])
        if self._on_device is not None:
            counts = counts + self._on_device.latest()
        means = counts.mean(1)
        balance = np.divide(counts.max(1), means, out=np.zeros_like(means), where=means > 0)
        return counts.sum(0), balance
