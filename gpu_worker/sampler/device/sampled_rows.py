"""What the device draws for a step, and finds for it, on its way to the host."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from tokenloom.engine_core.data.messages import Logprobs

from ...device.device_link import DeviceLink, Event
from .logprob_arrays import FoundLogprobs, LogprobArrays
from .pending_tokens import PendingTokens


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
        copies = [_fetch(tensor, link) for tensor in found.tensors()]
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
