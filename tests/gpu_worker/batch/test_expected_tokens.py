"""Tokens that the batch gets later than its next step."""

import numpy as np
import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch.expected_tokens import UNKNOWN_TOKEN, ExpectedTokens
from tokenloom.gpu_worker.batch.input_batch import InputBatch

PARAMS = CoreSamplingParams(max_tokens=9, seed=1)


class Tokens:
    def __init__(self, token_ids, *, arrived=False):
        self._token_ids, self.arrived, self.was_awaited = token_ids, arrived, False

    def has_arrived(self):
        return self.arrived

    def wait(self):
        self.was_awaited = True
        return self._token_ids


def step(news=(), cached=(), finished=(), preempted=()):
    data = [NewRequestData(name, tokens, [], PARAMS, [index], 0) for index, (name, tokens) in enumerate(news)]
    known = CachedRequestData([name for name, _ in cached], [[] for _ in cached], [n for _, n in cached], {})
    counts = {name: len(tokens) for name, tokens in news} | {name: 1 for name, _ in cached}
    return SchedulerOutput(data, known, counts, sum(counts.values()), list(finished), list(preempted))


@pytest.fixture
def batch():
    batch = InputBatch(2, 4, 16)
    batch.update(step(news=[("a", [1, 2]), ("b", [3])]))
    return batch


def rows(batch, *names):
    return np.array([batch._row_of[name] for name in names])


def test_a_step_computes_tokens_that_only_the_device_knows(batch):
    expected = ExpectedTokens(batch)
    tokens = Tokens([50, -1])
    expected.add(batch.expect_tokens(rows(batch, "a", "b")), tokens)
    expected.settle()
    assert len(expected.steps) == 1
    assert not tokens.was_awaited, "the latest step's tokens are not waited for"
    batch.update(step(cached=[("a", 2), ("b", 1)]))
    inputs = batch.prepare({"a": 1, "b": 1})
    assert inputs.token_ids.tolist() == [UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert inputs.positions.tolist() == [2, 1]
    assert inputs.sampled.tolist() == [0, 1]
    assert batch.output_indices(inputs.rows).tolist() == [1, 1]
    expected.add(batch.expect_tokens(inputs.rows), Tokens([60, 61]))
    expected.settle()
    assert len(expected.steps) == 1
    assert batch.known_tokens("a").tolist() == [1, 2, 50, UNKNOWN_TOKEN]
    assert batch.known_tokens("b").tolist() == [3, 0, UNKNOWN_TOKEN], "a row without a token computes token 0"


def test_tokens_that_have_arrived_are_taken_at_once(batch):
    expected = ExpectedTokens(batch)
    expected.add(batch.expect_tokens(rows(batch, "b")), Tokens([8], arrived=True))
    expected.settle()
    assert not len(expected.steps)
    assert batch.known_tokens("b").tolist() == [3, 8]


@pytest.mark.parametrize("ends", [{"finished": ["a"]}, {"preempted": ["a"]}])
def test_a_row_that_is_another_requests_keeps_its_tokens(batch, ends):
    expected = ExpectedTokens(batch)
    (row,) = rows(batch, "a")
    expected.add(batch.expect_tokens(rows(batch, "a", "b")), Tokens([50, 51]))
    batch.update(step(news=[("c", [8, 9])], **ends))
    assert rows(batch, "c").tolist() == [row]
    expected.add(batch.expect_tokens(rows(batch, "c")), Tokens([70]))
    expected.settle()
    assert batch.known_tokens("c").tolist() == [8, 9, UNKNOWN_TOKEN]
    assert batch.known_tokens("b").tolist() == [3, 51]


def test_behind_the_last_position_there_is_no_room_for_a_token(batch):
    batch.append(rows(batch, "a"), np.array([4]))
    batch.append(rows(batch, "a"), np.array([5]))
    expected = ExpectedTokens(batch)
    expected.add(batch.expect_tokens(rows(batch, "a", "b")), Tokens([6, 7], arrived=True))
    expected.settle()
    assert batch.known_tokens("a").tolist() == [1, 2, 4, 5]
    assert batch.known_tokens("b").tolist() == [3, 7]


def test_nothing_is_expected_after_a_failure(batch):
    expected = ExpectedTokens(batch)
    tokens = Tokens([1], arrived=True)
    expected.add(batch.expect_tokens(rows(batch, "b")), tokens)
    expected.clear()
    expected.settle()
    assert not tokens.was_awaited
