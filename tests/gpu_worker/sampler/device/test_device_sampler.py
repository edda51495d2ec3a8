"""What a device draws is what the host draws, and only the rows that the device cannot serve come to the host."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.device.host_draw import HostKernels, make_device_sampler
from tests.gpu_worker.sampler.device.sampling_params import PARAMS
from tests.gpu_worker.sampler.device.sampling_steps import VOCAB, Steps, bitmask, check_equal
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.device.device_link import HostLink
from tokenloom.gpu_worker.sampler import step_sampler
from tokenloom.gpu_worker.sampler.device import device_sampler as device_sampling
from tokenloom.gpu_worker.sampler.device import device_sampler as seen_counts
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampling_arrays import MOST_LISTED
from tokenloom.gpu_worker.sampler.host.sampler import NO_TOKEN, Sampler

PENALIZED = {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


def compare(requests, num_steps=3, grammar=None, spoil=None, **options):
    device, host = Steps(requests, make_device_sampler(), **options), Steps(requests, None, **options)
    for _ in range(num_steps):
        found = device.run(grammar, spoil)
        check_equal(found, host.run(grammar, spoil))
    return found


@pytest.fixture
def fetched(monkeypatch):
    """How many bytes of logits came to the host for each of its draws."""
    sizes = []
    draw = step_sampler.StepSampler._draw_on_host

    def counted(self, inputs, places, on_device, *others):
        sizes.append(on_device.nbytes)
        return draw(self, inputs, places, on_device, *others)

    monkeypatch.setattr(step_sampler.StepSampler, "_draw_on_host", counted)
    return sizes


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.data())
def test_any_mixture_draws_the_host_s_tokens(requests, data):
    row = data.draw(st.integers(0, len(requests) - 1))
    words = bitmask(*data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)))
    grammar = data.draw(
        st.sampled_from([None, GrammarOutput([f"r{row}"], words), GrammarOutput([f"r{row}"], words, {f"r{row}": 7})])
    )
    compare(requests, grammar=grammar)


@pytest.mark.parametrize("constrained", ["r0", "r1"])
def test_a_grammar_beside_a_row_that_the_host_draws(constrained, monkeypatch, fetched):
    """Log probabilities of more tokens than the device lists, and penalties without memory for their counts."""
    grammar = GrammarOutput([constrained], bitmask(5, 9), {})
    compare([{"temperature": 0.0}, {"temperature": 0.0, "logprobs": MOST_LISTED + 1}], grammar=grammar)
    monkeypatch.setattr(seen_counts.SeenCounts, "_grow", lambda self: False)
    compare([{"temperature": 0.0}, PENALIZED], grammar=grammar)
    assert sum(nbytes == 4 * VOCAB for nbytes in fetched) == 6, "one row of each step"


@pytest.mark.parametrize(
    "asking",
    [
        PENALIZED,
        {"logit_bias": {3: 5.0}},
        {"bad_words": ((4,), (1, 2))},
        {"min_tokens": 2, "stop_token_ids": (5, 6)},
        {"allowed_token_ids": (3, 90)},
        {"logprobs": 3, "logprob_token_ids": (7,)},
    ],
    ids=lambda asking: next(iter(asking)) if "temperature" not in asking else "penalties",
)
def test_no_logits_come_to_the_host(asking, fetched):
    device = Steps([{"temperature": 0.0}, {"temperature": 1.0} | asking], make_device_sampler())
    for _ in range(3):
        device.run(GrammarOutput(["r0"], bitmask(5, 9), {}))
    assert fetched == []


def test_only_ids_and_listed_log_probabilities_cross_the_link(fetched):
    """A row of logits has 400 bytes here."""

    class CountingLink(HostLink):
        num_bytes = 0

        def fetch(self, target, source):
            self.num_bytes += source.nbytes
            super().fetch(target, source)

    for asking, expected in ((PENALIZED, 3 * 8), (PENALIZED | {"logprobs": 2}, 3 * 8 + 3 * (4 + 4) + 4 + 8)):
        link = CountingLink()
        Steps([{"temperature": 0.0}, {"temperature": 1.0} | asking, {}], DeviceSampler(HostKernels(), link)).run()
        assert link.num_bytes == expected
    assert fetched == []


def test_a_row_that_the_device_cannot_serve_comes_alone(fetched, monkeypatch):
    monkeypatch.setattr(device_sampling, "MOST_LISTED", 10)
    requests = [{"temperature": 1.0}, {"logprobs": 20, "temperature": 1.0}, PENALIZED, {"logprobs": 2}]
    found = compare(requests, num_steps=1)
    assert fetched[0] == VOCAB * 4
    assert found.logprobs.keys() == {"r1", "r3"}


def test_a_penalized_row_comes_alone_where_the_device_has_no_memory_for_its_counts(fetched, monkeypatch):
    requests = [{"temperature": 1.0}, PENALIZED, PENALIZED | {"logprobs": 2}]
    device, host = Steps(requests, make_device_sampler()), Steps(requests, None)
    check_equal(device.run(), host.run())
    fetched.clear()

    class NoMemory:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *size, **options):
            if size[0]:
                raise torch.OutOfMemoryError
            return torch.empty(*size, **options)

    monkeypatch.setattr(seen_counts, "torch", NoMemory())
    check_equal(device.run(), host.run())
    assert fetched == [3 * VOCAB * 4], "the host's own draw: the counts of the device were there already"
    fetched.clear()
    first = Steps(requests, make_device_sampler()).run()
    assert fetched == [2 * VOCAB * 4]
    check_equal(first, Steps(requests, None).run())


def test_a_row_without_a_token_beside_one_that_asks_for_more():
    requests = [{"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": 2}]
    found = compare(requests, 1, spoil={1: float("nan"), 2: float("nan")})
    assert found.without_finite_logit == ["r1", "r2"]
    found = compare([*requests, {"allowed_token_ids": (3,)}], 1, spoil={3: float("-inf")})
    assert found.without_choice == ["r3"]


def test_logits_that_are_not_finite_are_counted_before_they_change():
    found = compare([PENALIZED, {"temperature": 0.0}], 1, spoil={0: float("nan")}, count_nans=True)
    assert found.num_nans_in_logits == {"r0": VOCAB}


def test_counts_follow_tokens_that_the_host_drew():
    """As after drafts were verified by another rule."""
    device, host = Steps([PENALIZED], make_device_sampler()), Steps([PENALIZED], None)
    sampler = device._sampler
    for on_host in (False, True, True, False, False):
        sampler.device_sampler, kept = (None if on_host else sampler.device_sampler), sampler.device_sampler
        check_equal(device.run(), host.run())
        sampler.device_sampler = kept


def test_a_slot_is_free_again_when_its_request_ends():
    sampler = make_device_sampler()
    for _ in range(3):
        Steps([PENALIZED] * 8, sampler).run()
        gc.collect()
        assert len(sampler._seen.words) == 8
    Steps([PENALIZED] * 9, sampler).run()
    assert len(sampler._seen.words) == 16


def test_the_device_gets_the_numbers_of_the_host():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (40, VOCAB)).astype(np.float32)
    logits[7] = np.nan
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
    params = [CoreSamplingParams(max_tokens=4, seed=row, **kinds[row % 2], top_k=row % 3 * 10) for row in range(40)]
    indices = rng.integers(0, 1 << 40, 40)
    found = make_device_sampler().sample(torch.from_numpy(logits.copy()), params, indices)
    assert found == Sampler().sample(logits, params, indices)
    assert found[7] == NO_TOKEN
