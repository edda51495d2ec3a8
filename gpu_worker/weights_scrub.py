"""Keeps checksums of the weights in memory, and compares them again and again: memory that changes by itself makes an
engine answer wrongly, and nothing else shows it."""

import contextlib
import ctypes
import functools
import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Final

import torch
from torch import Tensor, nn

from .layers.expert_routes import ExpertRoutes, LayerRoutes
from .lora.adapted_linear import GroupedChanges
from .lora.adapter import Matrices
from .models.experts import Experts

log = logging.getLogger(__name__)

_PACKAGE = __name__.split(".gpu_worker.", maxsplit=1)[0] + ".gpu_worker."
_NO_WEIGHTS = tuple(
    _PACKAGE + name
    for name in (
        *("parallel", "batch", "device", "cuda", "cpu_graphs", "platform", "kv_connector", "checkpoint"),
        *("models.transformers.paged_attention", "models.transformers.states"),
    )
)
"""Modules whose objects hold no weights, but memory that steps write to."""
_OF_STEPS: Final = frozenset({"kept_states", "_input", "_result", "hidden"})
"""Attributes of parts of a model that hold what a step has computed."""
_OF_TORCH: Final = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of modules, which names of tensors leave out."""


def weights_of(parts: Mapping[str, object], *, moves_experts: bool = False) -> dict[str, Tensor]:
    """Return the tensors that steps read and never write, by where they are in ``parts``, each once.

    Those of adapters are left out where they lie in slots of layers, which steps fill. ``moves_experts``: those of
    experts are left out too, because steps move them.
    """
    found: dict[tuple[int, int], tuple[str, Tensor]] = {}
    changing = (ExpertRoutes, LayerRoutes, GroupedChanges, *((Experts,) if moves_experts else ()))
    seen: set[int] = set()
    for name, part in parts.items():
        # In adapters themselves the matrices are what is to be found.
        skipped = changing if name == ADAPTERS else (*changing, Matrices)
        for place, tensor in _walk(name, part, seen, skipped):
            if (memory := _memory(tensor))[1]:
                found.setdefault(memory, (place, tensor))
    return dict(found.values())


ADAPTERS: Final = "adapters"
"""The name of the part that holds LoRA adapters."""


def _walk(name: str, part: object, seen: set[int], skipped: tuple[type, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors below ``part`` with their places."""
    if isinstance(part, Tensor):
        if not part.is_meta and (part.is_mkldnn or part.layout is torch.strided):
            yield name, part
        return
    if id(part) in seen or isinstance(part, skipped):
        return
    seen.add(id(part))
    for key, child in _children(part):
        if key not in _OF_STEPS:
            yield from _walk(name if key in _OF_TORCH else f"{name}.{key}", child, seen, skipped)


def _children(part: object) -> Iterator[tuple[str, object]]:
    module = type(part).__module__
    if isinstance(part, Mapping):
        yield from ((key.hex() if isinstance(key, bytes) else str(key), child) for key, child in part.items())
    elif isinstance(part, (list, tuple)):
        yield from ((str(number), child) for number, child in enumerate(part))
    elif isinstance(part, functools.partial):
        yield from (("func", part.func), ("args", part.args), ("keywords", part.keywords))
    elif isinstance(part, MethodType):
        yield "self", part.__self__
    elif isinstance(part, FunctionType):
        # Some layers are functions over their parts, and models change modules of others by such.
        if part.__module__.startswith(_PACKAGE):
            yield from zip(part.__code__.co_freevars, _contents(part), strict=True)
    elif isinstance(part, nn.Module):
        yield from vars(part).items()
    elif module.startswith(_PACKAGE) and not module.startswith(_NO_WEIGHTS):
        yield from getattr(part, "__dict__", {}).items()
        slots = {name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())}
        yield from ((name, getattr(part, name)) for name in sorted(slots) if hasattr(part, name))


def _contents(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            yield None


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return where the numbers of a tensor lie, and the bytes from the first to the last one."""
    if tensor.is_mkldnn:  # packed by oneDNN: torch shows its memory by these calls only
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (1 + last) * tensor.itemsize


@dataclass(slots=True)
class _Piece:
    """Describes a part of a tensor that is read at once. ``first`` and ``nbytes`` are bytes."""

    name: str
    tensor: Tensor
    first: int
    nbytes: int
    checksum: int = 0

    def crc(self) -> int:
        # By its address, because no view of bytes exists of what oneDNN packed. zlib releases the interpreter's lock.
        return zlib.crc32((ctypes.c_char * self.nbytes).from_address(_memory(self.tensor)[0] + self.first))

    def sums(self) -> Tensor:
        """Return [2] int64 on the tensor's device: the sum of its words of 32 bits, and that of the bytes behind."""
        tensor = self.tensor
        start = tensor.storage_offset() * tensor.itemsize + self.first
        held = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        held.set_(tensor.untyped_storage(), start, (self.nbytes,), (1,))
        # Any one bit that flips changes a sum, which is all that memory of a device does by itself.
        whole = self.nbytes - self.nbytes % 4 if start % 4 == 0 else 0
        words = held[:whole].view(torch.int32) if whole else held[:0]
        return torch.stack([words.sum(), held[whole:].sum()])


_PIECE, _DEVICE_PIECE = 1 << 20, 1 << 26
"""Bytes that are compared at once: in 0.3 ms on a CPU, so that a compute thread waits no longer for its core."""
_CAUGHT_UP = 16
"""Pieces that are compared without their pauses because the thread came late, at most."""
_ASLEEP_SECONDS = 60.0
"""How often to look, at least, whether weights are there again."""


class WeightsScrub:
    """Compares the weights of one worker with their checksums, in one pass after the other.

    On a CPU a thread of its own reads 1 MiB at a time, which delays no step by a call: checksums are computed without
    the interpreter's lock, at 3.6 GB/s, and the pauses between keep the memory's bandwidth for steps. A pass behind
    each step instead would never come to an idle engine. The thread keeps its priority: a step would wait for the
    interpreter's lock while a thread of low priority that holds it waits for a core.

    On a device :meth:`look` is called in the worker's own thread, as often as the workers' health is asked for: graphs
    are captured there, and what another thread launches meanwhile would spoil them.

    Attributes:
        damage: Which weights have changed; empty: none.
        pass_seconds: How long a pass takes.
        num_bytes: Of all weights.
        num_compared: Pieces that were compared.
    """

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        on_damage: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seconds``: of a pass. ``on_damage`` is called once, from any thread, with :attr:`damage`, and may not keep
        what holds the weights alive."""
        self.damage = ""
        self.pass_seconds = seconds
        self.num_bytes = self.num_compared = 0
        self._on_host = device.type == "cpu"
        self._on_damage, self._clock = on_damage, clock
        self._pieces: list[_Piece] = []
        self._next = 0
        self._looked_at = self._due_at = clock()
        self._lock = threading.Lock()  # held while weights change, and while pieces are compared
        # Not an event: what collects garbage may close it in any thread, also while that thread waits here.
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Keep the checksums of these weights, and begin to compare them, without a thread on a device."""
        with self._lock:
            self._learn(weights)
        if self._on_host:
            threading.Thread(target=self._run, name="weights-scrub", daemon=True).start()

    @contextlib.contextmanager
    def changing(self, weights: Callable[[], Mapping[str, Tensor]], *, adds: bool = False) -> Iterator[None]:
        """Compare nothing in the block, and keep the checksums of what ``weights`` returns behind it. ``adds``: the
        block changes no tensor that is there, but may add and drop some; otherwise none is kept alive meanwhile."""
        with self._lock:
            if not adds:
                self._pieces = []
            try:
                yield
            finally:
                self._learn(weights())

    def look(self, nbytes: int | None = None) -> None:
        """Compare the next pieces, of about so many bytes; None: of as many as are due since the last call."""
        with self._lock:
            now = self._clock()
            if nbytes is None:
                nbytes = round(self.num_bytes * min(1.0, (now - self._looked_at) / self.pass_seconds))
            self._looked_at = now
            if not self.damage:
                self._compare(self._take(nbytes))

    def close(self) -> None:
        """End the thread, and keep no weights alive. Idempotent; safe in finalizers."""
        self._pieces = []
        self._ends.put(None)

    def _run(self) -> None:
        spent = 0.0
        while not self.damage:
            try:
                self._ends.get(timeout=self._pause(spent))
                return
            except queue.Empty:
                began = self._clock()
                self.look(_PIECE)
                spent = self._clock() - began

    def _pause(self, spent: float) -> float:
        """Return how many seconds to wait before the next pieces; ``spent``: those that the last ones took."""
        now = self._clock()
        if not self.num_bytes:
            self._due_at = now
            return min(self.pass_seconds, _ASLEEP_SECONDS)
        # By the clock, so that a thread that had to wait for a core catches up, though not with what a stopped machine
        # has missed.
        share = self.pass_seconds * min(1.0, _PIECE / self.num_bytes)
        self._due_at = max(self._due_at, now - _CAUGHT_UP * share) + share
        # At most half of a core, however short a pass is wanted to be.
        return max(spent, self._due_at - now)

    def _learn(self, weights: Mapping[str, Tensor]) -> None:
        known = {(id(piece.tensor), piece.first): piece for piece in self._pieces}
        size = _PIECE if self._on_host else _DEVICE_PIECE
        pieces, new = [], []
        for name, tensor in weights.items():
            total = _memory(tensor)[1]
            for first in range(0, total, size):
                piece = known.get((id(tensor), first))
                if piece is None:
                    new.append(piece := _Piece(name, tensor, first, min(size, total - first)))
                pieces.append(piece)
        for piece, checksum in zip(new, self._checksums(new), strict=True):
            piece.checksum = checksum
        # The pass goes on: an engine whose adapters change all the time would compare nothing but the first pieces.
        left = {id(piece) for piece in self._pieces[self._next :]}
        self._next = next((at for at, piece in enumerate(pieces) if id(piece) in left), 0)
        self._pieces = pieces
        self.num_bytes = sum(piece.nbytes for piece in pieces)
        if new:
            log.debug("%d bytes of weights are compared once in %g s", self.num_bytes, self.pass_seconds)

    def _take(self, nbytes: int) -> list[_Piece]:
        """Return the next pieces, at least one and none twice, and go on behind them."""
        pieces, taken = self._pieces, list[_Piece]()
        while len(taken) < len(pieces) and (not taken or nbytes > 0):
            taken.append(pieces[self._next])
            nbytes -= taken[-1].nbytes
            self._next = (self._next + 1) % len(pieces)
        return taken

    def _compare(self, pieces: Sequence[_Piece]) -> None:
        for piece, checksum in zip(pieces, self._checksums(pieces), strict=True):
            self.num_compared += 1
            if checksum != piece.checksum:
                last = piece.first + piece.nbytes - 1
                self.damage = f"bytes {piece.first} to {last} of {piece.name} have changed since they were loaded"
                self._on_damage(self.damage)
                return

    @torch.inference_mode()
    def _checksums(self, pieces: Sequence[_Piece]) -> list[int]:
        if self._on_host:
            return [piece.crc() for piece in pieces]
        if not pieces:
            return []
        # One copy for all of them: each waits for the steps that were begun before it.
        sums = torch.stack([piece.sums() for piece in pieces]).tolist()
        return [(words << 64) + rest for words, rest in sums]
