"""Exchanges tensors with torch.distributed: over gloo between processors, over nccl between GPUs.

The process groups are objects of this engine, not the one default group of a process, so that several engines can be
in one process, as in tests.
"""

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenloom.engine_core.data.config import ParallelConfig

from .group import ALONE, RankGroup
from .sharding import RankPlace
from .shared_group import RecordableGroup, shared_if_possible

if TYPE_CHECKING:  # engines that do not move experts import none of it
    from .experts.balancer import ExpertBalancer

_c10d: Any = dist  # its types do not export the classes that process groups are made of
_TIMEOUT = timedelta(minutes=30)
"""A stage waits so long for a step, and an idle engine has none; the executor notices a rank that ends at once."""
_LOOPBACK = "127.0.0.1"
_MOST_SENT = 64
"""Tensors whose transfer may not have ended: more than the steps in flight can send."""


class TorchGroup:
    """Fulfils :class:`.group.RankGroup`."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        """``backend``: a process group of torch.distributed."""
        self.rank = rank
        self.size = size
        self._backend = backend

    def all_reduce(self, x: Tensor) -> Tensor:
        self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        self._backend.allgather([list(gathered)], [x.contiguous()]).wait()
        return gathered


class TorchPeers:
    """Fulfils :class:`.group.Peers`."""

    def __init__(self, backend: Any, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._sent: deque[tuple[Any, Tensor]] = deque()  # bounded by _MOST_SENT

    def send(self, x: Tensor, rank: int) -> None:
        while self._sent and (len(self._sent) == _MOST_SENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        self._sent.append((self._backend.send([x], rank, 0), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._backend.recv([x], rank, 0).wait()
        return x


class TorchLink:
    """Fulfils :class:`.balance.transfer.WeightLink`."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend

    def send(self, x: Tensor, rank: int, tag: int) -> Any:
        return self._backend.send([x], rank, tag)

    def receive(self, x: Tensor, rank: int, tag: int) -> Any:
        return self._backend.recv([x], rank, tag)

    def add(self, x: Tensor) -> Tensor:
        self._backend.allreduce([x]).wait()
        return x


def join(
    parallel: ParallelConfig, place: RankPlace, device: torch.device, balancer: "ExpertBalancer | None"
) -> tuple[RankGroup, TorchPeers | None, TorchPeers]:
    """Join the other ranks of the engine where ``parallel`` says, and wait for them; ``balancer`` gets its own way to
    them. Returns the group of the ranks that compute the same layers, the peers that carry tensors between stages,
    None if there is one stage, and those that carry tokens."""
    rank, size = parallel.rank, parallel.world_size
    store, host = _store(parallel.rendezvous, rank, size, _TIMEOUT)
    host_peers = TorchPeers(_gloo(_c10d.PrefixStore("host", store), rank, size, host), torch.device("cpu"))
    make = _nccl if device.type == "cuda" else _gloo
    tensors = None
    if place.num_stages > 1:
        tensors = TorchPeers(make(_c10d.PrefixStore("stages", store), rank, size, host), device)
    group: RankGroup = ALONE
    if (tensor_size := place.tensor_size) > 1:
        prefix = _c10d.PrefixStore(f"stage-{place.stage}", store)
        group = TorchGroup(make(prefix, place.tensor_rank, tensor_size, host), place.tensor_rank, tensor_size)
        if device.type == "cpu" and host == _LOOPBACK:
            group = shared_if_possible(group, store, f"sums-{place.stage}")
        if device.type == "cpu":
            group = RecordableGroup(group)
    if balancer is not None:
        prefix = _c10d.PrefixStore(f"moves-{place.stage}", store)
        balancer.join(TorchLink(_gloo(prefix, place.tensor_rank, tensor_size, host), place.tensor_rank, tensor_size))
    return group, tensors, host_peers


class Meeting:
    """Where the ranks of several engines find each other. Fulfils :class:`.experts.expert_exchange.ExpertMeeting`."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout: timedelta) -> None:
        """``rendezvous``: as in ``ParallelConfig``."""
        self._rank, self._size = rank, size
        self._store, self._host = _store(rendezvous, rank, size, timeout)
        self._store.set_timeout(timeout)

    def gloo(self, name: str) -> Any:
        """Join the other ranks in a process group. Raises ``RuntimeError`` if they do not come in time."""
        return _gloo(_c10d.PrefixStore(name, self._store), self._rank, self._size, self._host)

    def link(self, name: str) -> TorchLink:
        """Join the other ranks in a group that carries weights. Raises as :meth:`gloo`."""
        return TorchLink(self.gloo(name), self._rank, self._size)


def _store(address: str, rank: int, size: int, timeout: timedelta) -> tuple[Any, str]:
    """Return where the ranks find each other, and the address at which this one can be reached."""
    if address.startswith("/"):
        return _c10d.FileStore(address, size), _LOOPBACK
    host, _, port = address.rpartition(":")
    store = _c10d.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
    return store, _address_towards(host, int(port))


def _address_towards(host: str, port: int) -> str:
    """Return the address of the interface that reaches ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    kind = _c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host, lazy_init=False)]
    options._timeout = _TIMEOUT
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, host: str) -> Any:
    kind = _c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = _TIMEOUT
    return kind(store, rank, size, options)
