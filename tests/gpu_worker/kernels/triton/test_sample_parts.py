"""Rows that are drawn by parts give the tokens that the host's rule draws."""

import math

import numpy as np
import pytest
import torch

from tests.gpu_worker.kernels.triton.test_sample import CASES, draw_both, make_rows
from tokenloom.gpu_worker.kernels.triton import sample_parts
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels, divides_rows
from tokenloom.gpu_worker.sampler.device.sampling_arrays import SamplingArrays
from tokenloom.gpu_worker.sampler.host.sampler import WHOLE, allowed_set, rates, weigh


def draw_by_parts(logits, params, width):
    host, device = draw_both(logits, params, width, divides=True)
    assert device == host
    return device


@pytest.fixture
def joined(monkeypatch):
    """What programs that join parts did: drew among the candidates, or read the whole row."""
    calls: list[str] = []

    def noted(name):
        function = getattr(sample_parts, name)

        def call(*arguments):
            calls.append(name)
            return function(*arguments)

        return call

    for name in ("_draw_among", "draw_within"):
        monkeypatch.setattr(sample_parts, name, noted(name))
    return calls


def test_random_rows_of_all_kinds(joined):
    kinds = [*CASES.values(), {"temperature": 0.0}]
    rows = [make_rows(row + 1, **kinds[row])[row] for row in range(len(kinds))]
    logits = np.random.default_rng(5).normal(0.0, 2.0, (len(rows), 317)).astype(np.float32)
    draw_by_parts(logits, rows, 128)
    assert joined.count("_draw_among") == 5, "those with top-k or top-p"


@pytest.mark.parametrize("name", ["top-p", "all of them"])
def test_equal_logits_go_to_the_lower_id(name):
    """Coarse logits: many are equal, also at the edge of the allowed set, in several parts of the row."""
    logits = np.random.default_rng(9).integers(0, 4, (2, 60)).astype(np.float32)
    draw_by_parts(logits, make_rows(2, **CASES[name]), 32)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}])
def test_masked_tokens_are_no_candidates(filters, joined):
    """Those of a grammar leave fewer tokens than top-k would."""
    logits = np.full((1, 300), -np.inf, dtype=np.float32)
    logits[:, [3, 199, 260]] = [0.0, 1.0, 0.5]
    assert draw_by_parts(logits, make_rows(1, **filters), 64)[0] in {3, 199, 260}
    assert joined == (["_draw_among"] if filters else [])


@pytest.mark.parametrize(
    ("filters", "scale", "expected"),
    [
        ({"top_p": 0.99}, 0.0, {"draw_within"}),  # all are equal, so all are candidates
        ({"top_p": 0.999, "temperature": 9.0}, 1.0, {"_draw_among", "draw_within"}),  # these have not the mass
        ({"top_k": 70}, 1.0, {"draw_within"}),  # more than a program holds
    ],
)
def test_a_row_is_read_again_where_the_candidates_do_not_suffice(filters, scale, expected, joined):
    logits = (np.random.default_rng(6).normal(0.0, 1.0, (2, 160)) * scale).astype(np.float32)
    draw_by_parts(logits, make_rows(2, **filters), 32)
    assert set(joined) == expected


def listed_by_parts(keys, params, width, group):
    """Model ``list_parts`` with NumPy: return the candidates of a row, or None where they are too many."""
    vocab, num_parts = len(keys), -(-len(keys) // width)
    padded = np.full(num_parts * width, -np.inf, dtype=np.float32)
    padded[:vocab] = keys
    bounds = -np.sort(-padded.reshape(-1, group).max(axis=1))
    if 0 < params.top_k < vocab:
        wanted = params.top_k
    else:
        wanted = min(width // 4, num_parts * (width // group // 2))
    hint = bounds[wanted - 1] if wanted <= len(bounds) else -np.inf
    found = [np.flatnonzero((part > -np.inf) & (part >= hint)) for part in padded.reshape(num_parts, width)]
    tokens = np.concatenate([part * width + places for part, places in enumerate(found)])
    return tokens if len(tokens) <= width and max(map(len, found)) <= width // 4 else None


def test_candidates_hold_all_that_the_host_may_draw():
    """A million draws: 400 rows with filters, and 2,500 numbers each. Where the candidates have the mass that a row
    wants, the host's allowed tokens are among them, so that the integers of both add up to the same sums."""
    random, num_known = np.random.default_rng(7), 0
    for row in range(400):
        filters = {"top_k": int(random.integers(1, 60))} if row % 3 else {}
        top_p = float(random.uniform(0.05, 0.99)) if row % 3 != 1 else 1.0
        params = make_rows(1, temperature=float(random.uniform(0.3, 1.5)), top_p=top_p, **filters)[0]
        logits = random.normal(0.0, 3.0, 1000).astype(np.float32)
        if row % 4 == 0:
            logits = logits.round(0)
        if row % 5 == 0:
            logits[random.random(1000) < 0.97] = -np.inf
        allowed, weights = allowed_set(logits, params)
        tokens = listed_by_parts(logits, params, 256, 4)
        if tokens is None:
            continue
        all_mass = weigh(logits, rates(np.array([params.temperature]))[0])
        mass = all_mass if not filters else np.sort(all_mass)[::-1][: params.top_k]
        if not filters and all_mass[tokens].sum() < math.ceil(int(mass.sum()) * top_p):
            continue
        num_known += 1
        assert set(allowed[weights > 0].tolist()) <= set(tokens.tolist())
        own = np.zeros(1000, dtype=np.int64)
        own[allowed] = weights
        numbers = random.random(2500)
        targets = np.minimum((weights.sum() * numbers).astype(np.int64), weights.sum() - 1)
        by_host = allowed[np.searchsorted(np.cumsum(weights), targets, side="right")]
        by_parts = tokens[np.searchsorted(np.cumsum(own[tokens]), targets, side="right")]
        assert (by_host == by_parts).all()
    assert num_known > 300


def test_a_million_plain_draws_of_divided_sums():
    """The part at which the sums of parts pass a number, and the place in it, are those of one running sum."""
    random = np.random.default_rng(3)
    logits = random.normal(0.0, 3.0, 1000).astype(np.float32)
    weights = weigh(logits, rates(np.array([0.8]))[0])
    weights[weights < math.ceil(0.001 * WHOLE)] = 0
    total = int(weights.sum())
    targets = np.minimum((total * random.random(1_000_000)).astype(np.int64), total - 1)
    parts = np.zeros((8, 128), dtype=np.int64)
    parts.reshape(-1)[:1000] = weights
    ends = np.cumsum(parts.sum(axis=1))
    chosen = np.searchsorted(ends, targets, side="right")
    within = targets - (ends - parts.sum(axis=1))[chosen]
    found = np.empty(len(targets), dtype=np.int64)
    for part in range(8):
        mine = chosen == part
        found[mine] = 128 * part + np.searchsorted(np.cumsum(parts[part]), within[mine], side="right")
    assert (found == np.searchsorted(np.cumsum(weights), targets, side="right")).all()


@pytest.mark.parametrize(
    ("rows", "vocab", "divides"),
    [(1, 151_936, True), (66, 151_936, True), (67, 151_936, False), (128, 151_936, False), (1, 4096, False)],
)
def test_rows_are_divided_where_most_multiprocessors_would_be_idle(rows, vocab, divides):
    assert divides_rows(rows, vocab, 4096, 132) is divides


def test_the_first_draw_launches_both_ways(monkeypatch):
    """So that a step with more rows, or fewer, waits for no compiler."""
    names: list[str] = []
    monkeypatch.setattr(sampler_kernels, "launch", lambda kernel, *_, **__: names.append(kernel.__name__))
    kernels, rows = TritonSamplerKernels(width=64, multiprocessors=4), make_rows(3)
    columns = [torch.from_numpy(each) for each in SamplingArrays.of(rows, np.arange(3))]
    by_parts = ["scan_parts", "list_parts", "draw_listed"]
    for count, expected in ((2, ["sample", *by_parts]), (3, ["sample"]), (1, by_parts)):
        names.clear()
        kernels.draw(torch.zeros(count, 100), columns)
        assert names == expected
