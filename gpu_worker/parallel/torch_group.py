"""Exchanges tensors with torch.distributed, over gloo between processors and over nccl between GPUs, and adds tensors
of ranks on one machine through memory that they share, which takes less time than a socket, and makes sums parts of
recorded steps.

The process groups are objects of this engine, not the one default group of a process, so that several engines can be in
one process, as in tests.
"""

import functools
import mmap
import os
import socket
from collections import deque
from collections.abc import Sequence
from ctypes import addressof, c_char
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenloom.engine_core.data.config import ParallelConfig

from ..call_recording.recorder import current_recorder
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import load_sums
from .group import ALONE, RankGroup
from .sharding import RankPlace

if TYPE_CHECKING:  # engines that do not move experts import none of it
    from .experts.balancer import ExpertBalancer

_SUMS = {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2}
"""What the kernel adds, by its numbers. Mirrors ``sum_ranks`` in ``sums.cpp``, as does the next."""
_LARGEST = 3


class SharedGroup:
    """Fulfils :class:`.group.RankGroup`; another group does what the kernel does not.

    The memory belongs to the first rank's process; it is anonymous, so that it ends with the last process of the group.
    """

    def __init__(self, inner: RankGroup, store: Any, name: str) -> None:
        """``store``: holds under ``name`` where the first rank's memory is.

        Raises :class:`KernelsUnavailable` without a compiler.
        """
        self.rank, self.size = inner.rank, inner.size
        self.inner = inner
        kernels = load_sums()
        self._sum, self._gather = kernels.sum_ranks, kernels.gather_ranks
        nbytes = kernels.shared_bytes(inner.size)
        fd = _open(store, name, nbytes, is_owner=inner.rank == 0)
        try:
            self._memory = mmap.mmap(fd, nbytes)
            inner.all_reduce(torch.zeros(1))  # the owner keeps its descriptor until all have opened the memory
        finally:
            os.close(fd)
        self._address = addressof(c_char.from_buffer(self._memory))

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in _SUMS or not x.is_contiguous():
            return self.inner.all_reduce(x)
        # A sum of 1 x 1024 floats over two ranks takes 76 µs this way and 442 over gloo's sockets, one of 512 x 1024
        # 1.5 ms instead of 3.6, on two loaded cores.
        self._sum(self._address, x.data_ptr(), x.numel(), self.rank, self.size, _SUMS[x.dtype])
        return x

    def all_max(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.int32
        assert x.is_contiguous()
        self._sum(self._address, x.data_ptr(), x.numel(), self.rank, self.size, _LARGEST)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self.inner.all_gather(x)

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        out_at = None if out is None else out.data_ptr()
        self._gather(self._address, x.data_ptr(), out_at, len(x), width, self.rank, self.size)


def shared_if_possible(inner: RankGroup, store: Any, name: str) -> RankGroup:
    """Return a group over shared memory, or ``inner`` where there are no kernels. All ranks are on one machine and
    have the same kernels."""
    try:
        return SharedGroup(inner, store, name)
    except KernelsUnavailable as error:
        warn_unavailable(f"ranks exchange tensors over sockets: {error}")
        return inner


def _open(store: Any, name: str, nbytes: int, *, is_owner: bool) -> int:
    """Return a descriptor of the memory, which its owner makes."""
    if is_owner:
        fd = os.memfd_create("tokenloom-sums", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        store.set(name, f"/proc/{os.getpid()}/fd/{fd}")
        return fd
    return os.open(store.get(name).decode(), os.O_RDWR | os.O_CLOEXEC)


class RecordableGroup:
    """Fulfils :class:`.group.RankGroup` over another group on the CPU, whose results replace the tensors that it
    gets."""

    def __init__(self, inner: RankGroup) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.inner = inner

    def all_reduce(self, x: Tensor) -> Tensor:
        recorder = current_recorder()
        if recorder is None:
            return self.inner.all_reduce(x)
        recorder.exchange(self.inner.all_reduce, x, reads=True, writes=True)
        return x

    def all_max(self, x: Tensor) -> Tensor:
        recorder = current_recorder()
        if recorder is None:
            return self.inner.all_max(x)
        recorder.exchange(self.inner.all_max, x, reads=True, writes=True)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if (recorder := current_recorder()) is not None:  # which would not see where the result comes from
            recorder.failure = recorder.failure or "a tensor that is gathered from all ranks is not recorded"
        return self.inner.all_gather(x)

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        recorder = current_recorder()
        if recorder is None:
            self.inner.gather_columns(x, out, width=width)
            return
        gather = functools.partial(self.inner.gather_columns, width=width)
        recorder.exchange(gather, x, reads=True, writes=False, into=out)


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

    def all_max(self, x: Tensor) -> Tensor:
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MAX
        self._backend.allreduce([x], options).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        self._backend.allgather([list(gathered)], [x.contiguous()]).wait()
        return gathered

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        # Ranks gather tensors of one shape, and their columns may differ by one.
        padded = x.new_zeros(len(x), -(-width // self.size))
        padded[:, : x.shape[1]] = x
        options = _c10d.GatherOptions()
        options.rootRank = 0
        if out is None:
            self._backend.gather([], [padded], options).wait()
            return
        gathered = padded.new_empty(self.size, *padded.shape)
        self._backend.gather([list(gathered)], [padded], options).wait()
        for rank, part in enumerate(gathered):
            first, end = (width * border // self.size for border in (rank, rank + 1))
            out[:, first:end] = part[:, : end - first]


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
    """Fulfils :class:`.experts.transfer.WeightLink`."""

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
) -> tuple[RankGroup, RankGroup, TorchPeers | None, TorchPeers]:
    """Join the other ranks of the engine where ``parallel`` says, and wait for them; ``balancer`` gets its own way to
    them. Returns the group of the ranks that compute the same layers, that of the ranks that divide prompts, the peers
    that carry tensors between stages, None if there is one stage, and those that carry tokens."""
    rank, size = parallel.rank, parallel.world_size
    store, host = _store(parallel.rendezvous, rank, size, _TIMEOUT)
    host_peers = TorchPeers(_gloo(_c10d.PrefixStore("host", store), rank, size, host), torch.device("cpu"))
    make = _nccl if device.type == "cuda" else _gloo
    tensors = None
    if place.num_stages > 1:
        tensors = TorchPeers(make(_c10d.PrefixStore("stages", store), rank, size, host), device)
    group: RankGroup = ALONE
    prefill: RankGroup = ALONE
    # Ranks that have the same part of the model divide prompts; each computes layers with the others of its copy.
    copy = f"{place.prefill_rank}-{place.stage}"
    if place.prefill_size > 1:
        prefix = _c10d.PrefixStore(f"prefill-{place.stage}-{place.tensor_rank}", store)
        backend = make(prefix, place.prefill_rank, place.prefill_size, host)
        prefill = TorchGroup(backend, place.prefill_rank, place.prefill_size)
    if (tensor_size := place.tensor_size) > 1:
        prefix = _c10d.PrefixStore(f"stage-{copy}", store)
        group = TorchGroup(make(prefix, place.tensor_rank, tensor_size, host), place.tensor_rank, tensor_size)
        if device.type == "cpu" and host == _LOOPBACK:
            group = shared_if_possible(group, store, f"sums-{copy}")
        if device.type == "cpu":
            group = RecordableGroup(group)
    if balancer is not None:
        prefix = _c10d.PrefixStore(f"moves-{copy}", store)
        balancer.join(TorchLink(_gloo(prefix, place.tensor_rank, tensor_size, host), place.tensor_rank, tensor_size))
    return group, prefill, tensors, host_peers


def _store(address: str, rank: int, size: int, timeout: timedelta) -> tuple[Any, str]:
    """Return where the ranks find each other, and the address at which this one can be reached."""
    if address.startswith("/"):
        return _c10d.FileStore(address, size), _LOOPBACK
    host, _, port = address.rpartition(":")
    store = _c10d.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds the interface; nothing is sent
        probe.connect((host, int(port)))
        return store, str(probe.getsockname()[0])


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
