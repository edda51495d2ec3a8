"""A link to a device that is always behind: what was asked of it is there only once it is waited for."""

import torch
from torch import Tensor

POISON = -77


class LateEvent:
    """Has occurred once it was waited for, or a later event of the same link was."""

    def __init__(self, link: "LateLink") -> None:
        self._link = link
        self._number = len(link.work)

    def query(self) -> bool:
        return self._link.num_done >= self._number

    def synchronize(self) -> None:
        self._link.num_waits += 1
        self._link.do(self._number)


class LateLink:
    """Fulfils ``DeviceLink``: counts copies and waits. Memory for results holds poison until an event."""

    def __init__(self) -> None:
        self.work: list[tuple[Tensor, Tensor]] = []
        self.num_done = self.num_waits = self.num_sends = self.num_fetches = 0

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON & 0xFF, dtype=torch.uint8)

    def send(self, target: Tensor, source: Tensor) -> None:
        self.num_sends += 1
        target.copy_(source)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        self.num_fetches += 1
        target.fill_(POISON)
        self.work.append((target, source.clone()))

    def event(self) -> LateEvent:
        return LateEvent(self)

    @torch.inference_mode()
    def do(self, number: int) -> None:
        """Do the first ``number`` pieces of work."""
        while self.num_done < number:
            target, source = self.work[self.num_done]
            target.copy_(source)
            self.num_done += 1
