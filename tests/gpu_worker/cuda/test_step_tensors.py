"""Captures one after the other: what they share, what a failed one leaves, and what their results keep."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch

from tests.gpu_worker.cuda.fake_cuda import FakeCuda
from tokenloom.gpu_worker.cuda import step_tensors
from tokenloom.gpu_worker.cuda.step_tensors import GraphCapture, unowned


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(step_tensors, "unowned", lambda tensor: tensor)
    return FakeCuda(monkeypatch)


def test_all_calls_run_on_one_stream_and_share_a_pool(cuda):
    capture = GraphCapture()
    graphs = [capture(lambda: cuda.multiply() or [torch.ones(2)]) for _ in range(3)]
    assert len(cuda.streams) == 1
    assert set(cuda.warmed) == set(cuda.streams)
    assert list(cuda.graphs_of.values()) == [len(graphs)]
    assert cuda.current is cuda.default


def test_no_workspace_stays_in_the_pool_of_graphs(cuda):
    capture = GraphCapture()
    graph = capture(lambda: cuda.multiply() or [])
    assert not cuda.workspace_of
    del graph
    assert not cuda.graphs_of, "the pool goes with its graphs"


def test_what_is_captured_after_the_graphs_were_dropped_has_a_pool_of_its_own(cuda):
    capture = GraphCapture()
    graph = capture(lambda: cuda.multiply() or [])
    first = graph.graph.pool
    cuda.kept.add(first)  # by a tensor that somebody still has
    del graph
    capture.forget()
    again = capture(lambda: cuda.multiply() or [])
    assert cuda.graphs_of == {first: 0, again.graph.pool: 1}


def test_a_capture_that_fails_leaves_nothing_behind(cuda):
    capture = GraphCapture()
    first = capture(list)

    def fail():
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(fail)
    assert gc.isenabled()
    assert cuda.current is cuda.default
    second = capture(lambda: cuda.multiply() or [])
    assert second.graph.pool != first.graph.pool


def test_an_error_of_the_call_itself_is_raised_before_a_capture_begins(cuda):
    def fail():
        raise KeyError("layer")

    with pytest.raises(KeyError):
        GraphCapture()(fail)
    assert not cuda.graphs_of


def test_a_result_is_a_view_that_keeps_no_memory(monkeypatch):
    def as_tensor(place, device):
        """What PyTorch does with memory of a GPU, with the host's."""
        (count,), (address, read_only) = (place.__cuda_array_interface__[name] for name in ("shape", "data"))
        assert not read_only
        return torch.from_numpy(np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=np.uint8))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    logits = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    found, kept = unowned(logits), weakref.ref(logits)
    assert (found.dtype, found.shape, found.data_ptr()) == (logits.dtype, logits.shape, logits.data_ptr())
    logits[1, 2] = 9.0
    assert found[1, 2] == 9.0
    part = logits.t()[1:]
    assert torch.equal(unowned(part), part), "also one that is no whole tensor"
    del part
    del logits
    assert kept() is None
