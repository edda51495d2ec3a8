"""The kernels that compute prompts in chunks against PyTorch's scan, token after token: the same values up to rounding,
and the same bits wherever a prompt is cut between chunks."""

import functools
import sys
from types import ModuleType

import pytest
import torch

from tests.gpu_worker.ops import test_state_ops as layers_of
from tests.gpu_worker.ops.test_state_ops import delta, error, mamba2
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan
from tokenloom.gpu_worker.checkpoint.mixer_config import STATE_CHUNK
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.state_ops import StateOps
from tokenloom.gpu_worker.ops.triton_ops import FlaStateOps, TritonOps, TritonStateOps

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.float16: (1e-3, 1e-4)}
"""The largest ‖found - expected‖ / ‖expected‖ of results and of states. In float16 matrices have two parts."""
LAYERS = {
    "delta": functools.partial(delta, by_channel=False, sizes=(2, 1, 16, 16)),
    "delta by channel": functools.partial(delta, by_channel=True, sizes=(1, 1, 16, 16)),
    "delta of odd sizes": functools.partial(delta, by_channel=False, sizes=(2, 2, 40, 9)),
    "delta by channel of odd sizes": functools.partial(delta, by_channel=True, sizes=(1, 1, 40, 9)),
    "mamba2": functools.partial(mamba2, sizes=(2, 2, 16, 16)),
    "mamba2 of odd sizes": functools.partial(mamba2, sizes=(3, 1, 9, 40)),
}
kinds = pytest.mark.parametrize("kind", LAYERS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def chunks():
    return TritonOps("chunks").states


def plan(lengths, read, written, chunk=STATE_CHUNK):
    return StatePlan.make(lengths, read, written, [], chunk).send(CPU)


def make(kind, num_tokens, monkeypatch, dtype=torch.float32):
    monkeypatch.setattr(layers_of, "NUM_TOKENS", num_tokens)
    return LAYERS[kind](dtype)


def compare(layer, chunks, runs, dtype=torch.float32):
    """Compute these runs in both ways. Returns the states before, and after chunks."""
    lengths, read, written = runs
    states, expected_states = layer.states(), layer.states()
    out = layer.run(chunks, slice(None), states, plan(lengths, read, written))
    expected = layer.run(StateOps(), slice(None), expected_states, plan(lengths, read, written, 1))
    of_results, of_states = TOLERANCE[dtype]
    assert error(out, expected) < of_results
    assert error(states, expected_states) < of_states
    return layer.states(), states


@kinds
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_prompts_have_the_values_of_a_scan(chunks, kind, num_tokens, monkeypatch):
    """Of one request, which begins with another one's state and leaves it as it is."""
    layer = make(kind, num_tokens, monkeypatch)
    before, after = compare(layer, chunks, ([num_tokens], [3], [1]))
    assert torch.equal(after[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])


@kinds
@dtypes
def test_ragged_batches_beside_tokens_that_decode(chunks, kind, dtype, monkeypatch):
    """Two decoded tokens, a prompt that keeps a state on its way, and one that is continued in place, and that is
    followed by two tokens that were decoded before the request was preempted."""
    lengths, read, written = [1, 64, 9, 1, 66, 1, 1], [0, FROM_ZERO, 1, 3, 4, 4, 4], [0, 1, 2, 3, 4, 4, 4]
    layer = make(kind, sum(lengths), monkeypatch, dtype)
    compare(layer, chunks, (lengths, read, written), dtype)


@kinds
def test_bits_do_not_depend_on_cuts_between_chunks(chunks, kind, monkeypatch):
    """Nor on the requests beside, nor on whether the cut is within a step or between two."""
    layer = make(kind, 136, monkeypatch)
    whole = layer.states()
    expected = layer.run(chunks, slice(None), whole, plan([136], [FROM_ZERO], [1]))
    within = layer.states()
    found = layer.run(chunks, slice(None), within, plan([64, 64, 8], [FROM_ZERO, 2, 3], [2, 3, 4]))
    assert torch.equal(found, expected)
    assert torch.equal(within[4], whole[1])
    between = layer.states()
    parts = [layer.run(chunks, slice(64), between, plan([64], [FROM_ZERO], [2]))]
    parts.append(layer.run(chunks, slice(64, None), between, plan([72], [2], [5])))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(between[5], whole[1])


@kinds
def test_single_tokens_have_the_bits_of_decoding(chunks, kind, monkeypatch):
    """Also those that are computed again behind the prompt of their request."""
    layer = make(kind, 67, monkeypatch)
    states, alone = layer.states(), layer.states()
    found = layer.run(chunks, slice(None), states, plan([65, 1, 1], [FROM_ZERO, 2, 2], [2, 2, 2]))
    layer.run(chunks, slice(65), alone, plan([65], [FROM_ZERO], [2]))
    scan = TritonOps("scan").states
    expected = [layer.run(scan, slice(t, t + 1), alone, plan([1], [2], [2], 1)) for t in (65, 66)]
    assert torch.equal(found[65:], torch.cat(expected))
    assert torch.equal(states[2], alone[2])


def _rule(ops, query, key, value, gates):
    states = torch.zeros(2, value.shape[1], key.shape[2], value.shape[2])
    chunk = 1 if type(ops) is StateOps else STATE_CHUNK
    out = ops.gated_delta(query, key, value, gates, states, plan([len(key)], [FROM_ZERO], [1], chunk))
    return torch.cat((out.flatten(), states[1].flatten()))


@dtypes
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("decay", [0.0, -1e-4, -25.0])
def test_equal_keys_and_strong_decays_stay_finite_and_right(chunks, decay, by_channel, dtype):
    """Powers of the products of equal keys would exceed what they cancel to, and the inverse of a decay over a chunk
    would be infinite."""
    rows = torch.randn(100, 1, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    key, query = rows[:1].expand(100, 1, 16).contiguous(), rows
    decays = torch.full((100, 1, 16) if by_channel else (100, 1), decay)
    if by_channel:
        decays[:, :, ::3] = 0.0
    gates = decays, torch.ones(100, 1)
    expected = _rule(StateOps(), query, key, rows, gates)
    assert error(_rule(chunks, query, key, rows, gates), expected) < (2e-6 if dtype == torch.float32 else 1e-3)


class Fla:
    """Stands for the two functions of ``fla-core``: computes them with PyTorch's scan, and counts the calls."""

    def __init__(self):
        self.sequences = []

    def __call__(self, *, q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert q.shape[:3] == k.shape[:3] == v.shape[:3], "heads of queries and keys are repeated"
        lengths, count = cu_seqlens.diff().tolist(), len(initial_state)
        self.sequences.append(lengths)
        states = initial_state.clone()
        runs = plan(lengths, range(count), range(count), 1)
        return StateOps().gated_delta(q[0], k[0], v[0], (g[0], beta[0]), states, runs)[None], states


@pytest.fixture
def fla(monkeypatch):
    stands_in = Fla()
    for name, function in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function, stands_in)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return stands_in


@pytest.mark.parametrize("kind", ["delta", "delta by channel"])
def test_fla_computes_runs_that_follow_each_other_in_turn(fla, kind, monkeypatch):
    """As it is called; what it computes is not tried here, because its kernels need a GPU."""
    layer = make(kind, 2 + 64 + 9 + 70, monkeypatch)
    ops = TritonOps("fla").states
    assert isinstance(ops, FlaStateOps)
    compare(layer, ops, ([1, 64, 9, 1, 70], [0, FROM_ZERO, 1, 3, 4], [0, 1, 2, 3, 5]))
    assert fla.sequences == [[64, 70], [9]]


def test_a_scan_is_not_asked_for_prompts_only(chunks, monkeypatch):
    """A step of prompts alone launches no kernel for decoded tokens."""
    launched = []
    monkeypatch.setattr(triton_ops, "launch", lambda kernel, grid, *_, **__: launched.append((kernel.__name__, grid)))
    layer = make("delta", 70, monkeypatch)
    layer.run(TritonStateOps("chunks"), slice(None), layer.states(), plan([70], [FROM_ZERO], [1]))
    assert launched == [
        ("delta_pairs", (2, 2)),
        ("delta_solve", (2, 2)),
        ("delta_chunks", (1, 2, 1)),
        ("gated_delta", (0, 2, 2)),
    ]
