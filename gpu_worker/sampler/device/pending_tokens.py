"""Token ids on their way from the device to the host."""

import torch
from torch import Tensor

from ...device.device_link import DeviceLink, Event


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
