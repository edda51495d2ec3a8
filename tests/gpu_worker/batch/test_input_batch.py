"""What a step takes from the persistent batch, as requests come, grow, are preempted, come back and end."""

import numpy as np
import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch.input_batch import InputBatch

PARAMS = CoreSamplingParams(max_tokens=8, seed=1)
PENALIZED = CoreSamplingParams(max_tokens=8, seed=1, temperature=0.0, frequency_penalty=2.0)


def step(new=(), cached=(), resumed=None, finished=(), preempted=(), **scheduled):
    """``cached``: (req_id, new block ids, computed tokens); keywords: tokens scheduled of each request."""
    columns = [list(column) for column in zip(*cached, strict=True)] or [[], [], []]
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(*columns, resumed or {}),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=list(finished),
        preempted_req_ids=list(preempted),
    )


def new(req_id, prompt, blocks, output=(), computed=0, params=PARAMS):
    return NewRequestData(req_id, list(prompt), list(output), params, list(blocks), computed)


@pytest.fixture
def batch():
    return InputBatch(max_num_seqs=3, max_model_len=16, block_size=4)


def append(batch, inputs, *token_ids):
    """A token for each row of the step."""
    batch.append(inputs.rows, np.array(token_ids))


def processed(batch, inputs):
    """What is left of logits that are zero."""
    logits = np.zeros((len(inputs.sampled), 8), dtype=np.float32)
    batch.logits_processors.apply(logits, inputs.rows[inputs.sampled])
    return logits.tolist()


def run(batch, scheduler_output):
    batch.update(scheduler_output)
    return batch.prepare(scheduler_output.num_scheduled_tokens)


def test_prompts_side_by_side(batch):
    inputs = run(batch, step(new=[new("a", [5, 6, 7], [2]), new("b", range(10, 16), [4, 1])], a=3, b=6))
    assert inputs.req_ids == ["a", "b"]
    assert inputs.token_ids.tolist() == [5, 6, 7, 10, 11, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert inputs.cu_query_lens.tolist() == [0, 3, 9]
    assert inputs.seq_lens.tolist() == [3, 6]
    assert inputs.slot_mapping.tolist() == [8, 9, 10, 16, 17, 18, 19, 4, 5]
    assert inputs.sampled.tolist() == [0, 1]


def test_a_chunk_draws_nothing_until_the_prompt_is_complete(batch):
    assert run(batch, step(new=[new("a", range(6), [0])], a=4)).sampled.tolist() == []
    inputs = run(batch, step(cached=[("a", [3], 4)], a=2))
    assert inputs.token_ids.tolist() == [4, 5]
    assert inputs.slot_mapping.tolist() == [12, 13]
    assert inputs.seq_lens.tolist() == [6]
    assert inputs.sampled.tolist() == [0]


def test_cached_prefix_is_not_computed_but_attended(batch):
    inputs = run(batch, step(new=[new("a", range(6), [7, 9], computed=4)], a=2))
    assert inputs.positions.tolist() == [4, 5]
    assert inputs.seq_lens.tolist() == [6]
    assert inputs.block_tables.tolist() == [[7, 9]]


def test_a_drawn_token_is_the_next_input(batch):
    inputs = run(batch, step(new=[new("a", [1, 2, 3, 4], [0])], a=4))
    assert batch.sampling(inputs.rows[inputs.sampled])[1].tolist() == [0]
    append(batch, inputs, 99)
    inputs = run(batch, step(cached=[("a", [1], 4)], a=1))
    assert inputs.token_ids.tolist() == [99]
    assert inputs.slot_mapping.tolist() == [4]
    assert batch.sampling(inputs.rows[inputs.sampled])[1].tolist() == [1]


def test_accepted_tokens_of_an_earlier_attempt_count(batch):
    inputs = run(batch, step(new=[new("a", [1, 2], [0, 1], output=[3, 4, 5], params=PENALIZED)], a=5))
    assert batch.sampling(inputs.rows[inputs.sampled])[1].tolist() == [3]
    assert processed(batch, inputs) == [[0, 0, 0, -2, -2, -2, 0, 0]]


def test_preempted_and_resumed(batch):
    inputs = run(batch, step(new=[new("a", [1, 2], [0], params=PENALIZED), new("b", [3], [1])], a=2, b=1))
    append(batch, inputs, 7, 4)
    assert processed(batch, inputs) == [[0, 0, 0, 0, 0, 0, 0, -2], [0] * 8]
    inputs = run(batch, step(cached=[("b", [], 1)], preempted=["a"], b=1))
    assert inputs.token_ids.tolist() == [4]
    assert len(batch) == 1
    assert processed(batch, inputs) == [[0] * 8]
    inputs = run(batch, step(cached=[("a", [5], 0)], resumed={"a": [1, 2, 7]}, a=3))
    assert inputs.token_ids.tolist() == [1, 2, 7]
    assert inputs.slot_mapping.tolist() == [20, 21, 22]
    assert batch.sampling(inputs.rows[inputs.sampled])[1].tolist() == [1]
    assert processed(batch, inputs) == [[0, 0, 0, 0, 0, 0, 0, -2]]


def test_rows_are_used_again(batch):
    for turn in range(10):
        names = [f"{turn}-{i}" for i in range(3)]
        news = [new(name, [turn, i], [turn * 3 + i]) for i, name in enumerate(names)]
        done = [f"{turn - 1}-{i}" for i in range(3)] if turn else []
        inputs = run(batch, step(new=news, finished=done, **dict.fromkeys(names, 2)))
        assert inputs.token_ids.tolist() == [turn, 0, turn, 1, turn, 2]
        assert sorted(inputs.rows.tolist()) == [0, 1, 2]
        assert inputs.block_tables.tolist() == [[turn * 3], [turn * 3 + 1], [turn * 3 + 2]]


def test_a_request_that_is_not_scheduled_keeps_its_row(batch):
    run(batch, step(new=[new("a", range(4), [0]), new("b", range(4), [1]), new("c", range(4), [2])], a=2, b=4, c=4))
    run(batch, step(cached=[("b", [], 3)], b=1))
    inputs = run(batch, step(cached=[("a", [], 2)], a=2))
    assert inputs.token_ids.tolist() == [2, 3]


def test_ending_an_unknown_request_is_nothing(batch):
    batch.update(step(finished=["never seen"], preempted=["nor this"]))
    assert len(batch) == 0


def test_the_last_token_of_a_full_context_needs_no_room(batch):
    inputs = run(batch, step(new=[new("a", range(16), [0, 1, 2, 3]), new("b", [1], [4])], a=16, b=1))
    append(batch, inputs, 5, 6)
    assert run(batch, step(cached=[("b", [], 1)], finished=["a"], b=1)).token_ids.tolist() == [6]


def test_cleared_it_is_as_new(batch):
    for _ in range(2):
        inputs = run(batch, step(new=[new(name, [1, 2], [0], params=PENALIZED) for name in "abc"], a=2, b=2, c=2))
        assert sorted(inputs.rows.tolist()) == [0, 1, 2]
        batch.clear()
        assert len(batch) == 0
