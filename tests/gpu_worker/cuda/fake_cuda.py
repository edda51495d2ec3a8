"""Takes the place of what captures use of ``torch.cuda``, with the rules by which PyTorch keeps memory for graphs."""

import contextlib
import itertools

import pytest
import torch


class FakeCuda:
    """Follows PyTorch 2.11 (CUDACachingAllocator.cpp, CUDAGraph.cpp, CUDABlas.cpp): a pool whose last graph is gone
    stays as long as a workspace of cuBLAS lies in it, and no capture may take it; a capture that failed leaves its
    stream as the current one and its pool in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs_of: dict[int, int] = {}
        """Pool to the number of its graphs that exist."""
        self.workspace_of: dict[object, int | None] = {}
        """Stream to the pool in which cuBLAS's workspace for it lies; None: in no pool."""
        self.kept: set[int] = set()
        """Pools in which other memory is in use."""
        self.underway: set[int] = set()
        self.streams: list[object] = []
        self.default = self.current = object()
        self.capturing: int | None = None
        self.warmed: list[object] = []
        """The stream of each call that was not captured."""
        handles = itertools.count(1)
        for name, value in {
            "Stream": self._make_stream,
            "stream": self._within,
            "current_stream": lambda: self.current_stream(),
            "set_stream": self._set,
            "graph_pool_handle": lambda: next(handles),
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self._graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)

    def multiply(self) -> None:
        """Do what each product does: take a workspace for the stream, if there is none."""
        if self.current not in self.workspace_of:
            self.workspace_of[self.current] = self.capturing
        if self.capturing is None:
            self.warmed.append(self.current)

    def clear_workspaces(self) -> None:
        self.workspace_of.clear()
        self.drop_empty()

    def drop_empty(self) -> None:
        held = self.kept | set(self.workspace_of.values())
        self.graphs_of = {pool: count for pool, count in self.graphs_of.items() if count or pool in held}

    def current_stream(self) -> "FakeStream":
        return FakeStream(self.current)

    def _make_stream(self) -> "FakeStream":
        self.streams.append(object())
        return FakeStream(self.streams[-1])

    def _set(self, stream: "FakeStream") -> None:
        self.current = stream.key

    @contextlib.contextmanager
    def _within(self, stream: "FakeStream"):
        before, self.current = self.current, stream.key
        yield
        self.current = before

    @contextlib.contextmanager
    def _graph(self, graph: "FakeGraph", pool: int, stream: "FakeStream | None" = None, capture_error_mode: str = ""):
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.graphs_of.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if stream is None:
            if not hasattr(self, "capture_stream"):
                self.capture_stream = self._make_stream()
            stream = self.capture_stream
        before, self.current, self.capturing = self.current, stream.key, pool
        self.graphs_of[pool] = self.graphs_of.get(pool, 0) + 1
        self.underway.add(pool)
        graph.pool = pool
        try:
            yield
        except BaseException as error:  # PyTorch's context ends the capture, which raises, before it leaves the stream
            self.capturing = None
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.current, self.capturing = before, None
        self.underway.remove(pool)


class FakeStream:
    def __init__(self, key: object) -> None:
        self.key = key

    def wait_stream(self, other: "FakeStream") -> None:
        pass


class FakeGraph:
    """Holds memory of its pool until it is gone."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.pool = 0

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self.pool:
            self._cuda.graphs_of[self.pool] -= 1
            self._cuda.drop_empty()
