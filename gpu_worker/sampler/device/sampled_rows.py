"""What the device draws for a step, and finds for it, on its way to the host."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tokenloom.engine_core.data.messages import Logprobs

from ...device.device_link import DeviceLink, Event
from .sampling_arrays import FoundLogprobs, LogprobArrays


class PendingTokens:
    """Holds token ids [rows] that the device has drawn or will draw. Any thread may wait for them."""

    def __init__(self, on_host: Tensor, event: Event) -> None:
        """``on_host``: int64, on the host, without content until the event."""
        self._on_host = on_host
        self._event = event

    @classmethod
    def fetch(cls, token_ids: Tensor, link: DeviceLink) -> "PendingTokens":
        """Begin to copy ``token_ids`` [rows] int64 to the host."""
        on_host = link.host_memory(token_ids.numel() * token_ids.element_size()).view(torch.int64)
        link.fetch(on_host, token_ids)
        return cls(on_host, link.event())

    def has_arrived(self) -> bool:
        """Return whether the token ids are there, without waiting."""
        return self._event.query()

    def wait(self) -> list[int]:
        """Return the token ids, once they are there. Nothing later of the device is waited for."""
        if not self._event.query():
            self._event.synchronize()
        token_ids: list[int] = self._on_host.tolist()
        return token_ids


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Holds log probabilities that are on their way to the host. Any thread may wait for them."""

    wanted: LogprobArrays
    on_host: FoundLogprobs
    """Without content until the event."""
    event: Event

    @classmethod
    def fetch(cls, wanted: LogprobArrays, found: FoundLogprobs, link: DeviceLink) -> Self:
        """Begin to copy what the device found."""
        copies = [_fetch(tensor, link) for tensor in found]
        return cls(wanted, FoundLogprobs(*copies), link.event())

    def wait(self) -> list[Logprobs]:
        """Return a position for each row that asks, once it is there."""
        if not self.event.query():
            self.event.synchronize()
        return self.on_host.read(self.wanted)

    def by_row(self) -> dict[int, Logprobs]:
        """Return the same by row of the logits."""
        return dict(zip(self.wanted.rows.tolist(), self.wait(), strict=True))


def _fetch(tensor: Tensor, link: DeviceLink) -> Tensor:
    target = link.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    link.fetch(target, tensor)
    return target


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Holds the tokens of a step, and the log probabilities that its rows asked for."""

    token_ids: Tensor
    """[rows] int64 on the device: ``NO_TOKEN`` where no logit is finite, and ``NO_CHOICE`` where all are -inf."""
    tokens: PendingTokens
    """The same, for the host."""
    logprobs: PendingLogprobs | None
    """None: no row asks for any."""
    left_out: Collection[int]
    """Rows that the device did not serve: their logits are as they were, and their tokens mean nothing."""

    def wait_for_logprobs(self) -> dict[int, Logprobs]:
        """Return the log probabilities by row, once they are there."""
        return {} if self.logprobs is None else self.logprobs.by_row()
