"""The runner over a real small model: however the work is cut, the same tokens come out."""

from pathlib import Path

import pytest
import torch

from tests.gpu_worker.sampler.device.host_draw import make_device_sampler
from tokenloom import demo_model
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput, await_output
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch import input_batch
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model

DEMO_MODEL = Path(demo_model.__file__).parent

PROMPTS = {"a": [7, 300, 12, 45, 99, 8, 1022, 5, 64, 31, 77], "b": [400, 2], "c": list(range(50, 90))}
PARAMS = {
    "a": CoreSamplingParams(max_tokens=8, seed=1, temperature=0.0),
    "b": CoreSamplingParams(max_tokens=8, seed=2, temperature=1.0, top_p=0.9),
    "c": CoreSamplingParams(max_tokens=8, seed=3, temperature=0.7, top_k=20, frequency_penalty=0.5),
}
BLOCKS = {"a": [3, 1], "b": [6], "c": [5, 0, 7, 4]}


class CountingModel:
    """A model that remembers how many rows of logits were asked of it."""

    def __init__(self, model):
        self.config, self.forward, self._model, self.logits_rows = model.config, model.forward, model, []

    def compute_logits(self, hidden):
        self.logits_rows.append(len(hidden))
        return self._model.compute_logits(hidden)


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(DEMO_MODEL, "float32")
    torch.set_num_threads(threads)


@pytest.fixture
def runner(model):
    counting = CountingModel(model)
    backend = make_attention_backend("torch", model.config, 16, torch.device("cpu"))
    runner = ModelRunner(counting, backend, InputBatch(4, 256, 16), num_blocks=8)
    runner.counting = counting
    return runner


def new(req_id, output=()):
    return NewRequestData(req_id, PROMPTS[req_id], list(output), PARAMS[req_id], BLOCKS[req_id], 0)


def begin(runner, scheduled, news=(), computed=None, resumed=None, preempted=(), finished=()):
    """Returns the output of a step, or the promise of it."""
    known = computed or {}
    cached = CachedRequestData(
        list(known), [BLOCKS[r] if r in (resumed or {}) else [] for r in known], list(known.values()), resumed or {}
    )
    runner.execute(
        SchedulerOutput(list(news), cached, scheduled, sum(scheduled.values()), list(finished), list(preempted))
    )
    return runner.sample()


def run(runner, scheduled, **changes):
    output = await_output(begin(runner, scheduled, **changes))
    return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def generate(runner, req_id, count):
    """Alone, the prompt in one piece."""
    length = len(PROMPTS[req_id])
    tokens = run(runner, {req_id: length}, news=[new(req_id)])[req_id]
    for position in range(length, length + count - 1):
        tokens += run(runner, {req_id: 1}, computed={req_id: position})[req_id]
    run(runner, {}, finished=[req_id])
    return tokens


def test_a_batch_computes_what_each_computes_alone(runner):
    alone = {req_id: generate(runner, req_id, 6) for req_id in PROMPTS}
    together = run(runner, {r: len(p) for r, p in PROMPTS.items()}, news=map(new, PROMPTS))
    for step in range(5):
        drawn = run(runner, dict.fromkeys(PROMPTS, 1), computed={r: len(p) + step for r, p in PROMPTS.items()})
        for req_id, tokens in drawn.items():
            together[req_id] += tokens
    assert together == alone


def test_greedy_requests_get_the_tokens_that_numpy_finds(model, monkeypatch):
    """Rows that draw beside a prompt that does not, a full context, and rows that end and are taken again."""

    def draw():
        backend = make_attention_backend("torch", model.config, 16, torch.device("cpu"))
        runner = ModelRunner(model, backend, InputBatch(3, 48, 16), num_blocks=8)
        news = [NewRequestData(r, PROMPTS[r], [], PARAMS["a"], BLOCKS[r][:3], 0) for r in PROMPTS]
        steps = [run(runner, {"a": 11, "b": 2, "c": 30}, news=news)]
        steps.append(run(runner, {"a": 1, "b": 1, "c": 5}, computed={"a": 11, "b": 2, "c": 30}))
        steps.append(run(runner, {"c": 5, "b": 1}, computed={"c": 35, "b": 3}))
        steps += [run(runner, {"c": 1}, computed={"c": 40 + step}) for step in range(8)]
        steps.append(run(runner, {"a": 11, "b": 1}, news=news[:1], computed={"b": 4}, finished=["a", "c"]))
        return [*steps, run(runner, {"b": 1, "a": 1}, computed={"b": 5, "a": 11})]

    found = draw()
    monkeypatch.setattr(input_batch, "make_kernel_sampler", lambda *_: None)
    assert found == draw()


def test_chunks_give_the_same_token_and_nothing_before_it(runner):
    (expected,) = generate(runner, "c", 1)
    assert run(runner, {"c": 17}, news=[new("c")]) == {"c": []}
    assert run(runner, {"c": 20}, computed={"c": 17}) == {"c": []}
    assert run(runner, {"c": 3}, computed={"c": 37}) == {"c": [expected]}


def test_resumed_after_preemption(runner):
    expected = generate(runner, "c", 6)
    tokens = run(runner, {"c": 40}, news=[new("c")])["c"]
    tokens += run(runner, {"c": 1}, computed={"c": 40})["c"]
    run(runner, {"b": 2}, news=[new("b")], preempted=["c"])
    resumed = {"c": PROMPTS["c"] + tokens}
    tokens += run(runner, {"c": 42}, computed={"c": 0}, resumed=resumed)["c"]
    for position in range(42, 45):
        tokens += run(runner, {"c": 1}, computed={"c": position})["c"]
    assert tokens == expected


def test_accepted_tokens_continue_the_same_output(runner):
    expected = generate(runner, "c", 6)
    assert run(runner, {"c": 43}, news=[new("c", output=expected[:3])])["c"] == [expected[3]]


def test_logits_only_for_rows_that_draw(runner):
    run(runner, {"a": 11, "b": 2, "c": 30}, news=map(new, PROMPTS))
    run(runner, {"c": 5}, computed={"c": 30})
    run(runner, {"c": 5, "a": 1}, computed={"c": 35, "a": 11})
    assert runner.counting.logits_rows == [2, 2]


def test_a_step_without_work_only_forgets(runner):
    run(runner, {"b": 2}, news=[new("b")])
    assert run(runner, {}, finished=["b"]) == {}
    assert run(runner, {"b": 2}, news=[new("b")])["b"]


def test_prompt_logprobs_take_few_rows_of_logits_at_once(runner):
    prompt = list(range(10, 110))
    params = CoreSamplingParams(max_tokens=8, seed=1, logprobs=0, prompt_logprobs=2)
    told = Logprobs([], [])
    chunks = [80, 19, 1]
    for start, length in zip((0, 80, 99), chunks, strict=True):
        news = [NewRequestData("p", prompt, [], params, list(range(7)), 0)] if not start else []
        cached = CachedRequestData(["p"], [[]], [start], {}) if start else CachedRequestData([], [], [], {})
        runner.execute(SchedulerOutput(news, cached, {"p": length}, length, [], []))
        output = runner.sample()
        told.extend(output.prompt_logprobs["p"])
        assert ("p" in output.logprobs) == (start == 99)
    assert (len(told.sampled), told.top, len(told.token_ids)) == (99, 2, 198)
    assert runner.counting.logits_rows == [64, 16, 19, 1]
    run(runner, {"p": 1}, computed={"p": 100})
    assert runner.counting.logits_rows[4:] == [1]


@pytest.mark.parametrize("lengths", [[1], [20, 1, 1], [33, 16]])
def test_a_dummy_run_fits_its_blocks(runner, lengths):
    runner.dummy_run(lengths, block_size=16)
    assert runner.counting.logits_rows == [len(lengths)]


@pytest.mark.parametrize("count_nans", [False, True])
def test_nan_logits_are_counted_when_asked(model, count_nans):
    class SpoiltModel(CountingModel):
        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden).clone()
            logits[0, 5:8] = float("nan")
            return logits

    backend = make_attention_backend("torch", model.config, 16, torch.device("cpu"))
    runner = ModelRunner(SpoiltModel(model), backend, InputBatch(4, 256, 16), num_blocks=8, count_nans=count_nans)
    step = SchedulerOutput([new("a"), new("b")], CachedRequestData([], [], [], {}), {"a": 11, "b": 2}, 13, [], [])
    runner.execute(step)
    assert runner.sample().num_nans_in_logits == ({"a": 3} if count_nans else {})


@pytest.mark.parametrize("backend", ["torch", "auto", "reference"])
def test_nothing_that_was_in_the_pool_is_read(model, backend):
    """However a request comes to its blocks: with a prompt, chunks, another's blocks, after a preemption, by a load."""

    def make_runner():
        attention = make_attention_backend(backend, model.config, 16, torch.device("cpu"))
        return ModelRunner(model, attention, InputBatch(4, 256, 16), num_blocks=8)

    expected = generate(make_runner(), "c", 6)
    runner = make_runner()
    for cache in runner.kv_caches:
        cache.fill_(float("nan"))
    assert generate(runner, "c", 6) == expected
    assert run(runner, {"c": 17}, news=[new("c")]) == {"c": []}
    run(runner, {"b": 2}, news=[new("b")], preempted=["c"])
    poison(runner, BLOCKS["c"], 0)
    assert run(runner, {"c": 40}, computed={"c": 0}, resumed={"c": PROMPTS["c"]})["c"] == expected[:1]
    assert run(runner, {"c": 1}, computed={"c": 40})["c"] == expected[1:2]
    run(runner, {}, finished=["c", "b"])
    poison(runner, BLOCKS["c"][2:3], 7)  # as if blocks of 39 tokens had been loaded
    loaded = NewRequestData("c", PROMPTS["c"], [], PARAMS["c"], BLOCKS["c"], 39)
    tokens = run(runner, {"c": 1}, news=[loaded])["c"]
    for position in range(40, 45):
        tokens += run(runner, {"c": 1}, computed={"c": position})["c"]
    assert tokens == expected


def poison(runner, blocks, first):
    """What other owners leave in these blocks, from the slot ``first`` of each on."""
    for cache in runner.kv_caches:
        cache[:, blocks, :, first:] = float("nan")


@pytest.mark.parametrize("device_sampler", [None, make_device_sampler()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"allowed_token_ids": (3, 4), "logprobs": 2}])
def test_a_row_without_a_finite_logit_ends_its_request_alone(model, params, bad, device_sampler):
    class SpoiltModel(CountingModel):
        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden).clone()
            logits[0] = bad
            return logits

    backend = make_attention_backend("torch", model.config, 16, torch.device("cpu"))
    batch = InputBatch(4, 256, 16)
    runner = ModelRunner(
        SpoiltModel(model), backend, batch, num_blocks=8, parts=RunnerParts(device_sampler=device_sampler)
    )
    spoilt = NewRequestData("a", PROMPTS["a"], [], CoreSamplingParams(max_tokens=4, seed=1, **params), BLOCKS["a"], 0)
    step = SchedulerOutput([spoilt, new("b")], CachedRequestData([], [], [], {}), {"a": 11, "b": 2}, 13, [], [])
    runner.execute(step)
    output = runner.sample()
    assert (output.without_finite_logit, output.without_choice) == (["a"], [])
    assert [len(token_ids) for token_ids in output.sampled_token_ids] == [0, 1]
    # With async scheduling the next step holds the request before its end is known.
    assert run(runner, {"a": 1, "b": 1}, computed={"a": 11, "b": 2})["b"]


@pytest.mark.parametrize("device_sampler", [None, make_device_sampler()])
def test_logits_are_measured_before_they_are_changed(model, device_sampler):
    backend = make_attention_backend("torch", model.config, 16, torch.device("cpu"))

    def first_step(interval):
        batch = InputBatch(4, 256, 16)
        runner = ModelRunner(
            model, backend, batch, 8, parts=RunnerParts(device_sampler=device_sampler), logits_metrics_interval=interval
        )
        prompts = {"a": 11, "b": 2, "c": 20}
        runner.execute(SchedulerOutput(list(map(new, prompts)), CachedRequestData([], [], [], {}), prompts, 33, [], []))
        logits = runner._executed.logits.clone()
        return logits, runner.sample(), runner

    logits, measured, runner = first_step(2)
    _, plain, _ = first_step(0)
    assert measured.sampled_token_ids == plain.sampled_token_ids
    assert plain.logits_stats == {}
    assert measured.logits_stats.keys() == {"a", "b"}, "c has no token yet"
    for row, req_id in enumerate("ab"):
        stats = measured.logits_stats[req_id]
        assert (stats.max, stats.min) == (logits[row].max(), logits[row].min())
        assert stats.temperature == PARAMS[req_id].temperature
    cached = CachedRequestData(["a"], [[]], [11], {})
    for is_measured in (False, True):
        runner.execute(SchedulerOutput([], cached, {"a": 1}, 1, [], []))
        assert bool(runner.sample().logits_stats) == is_measured
        cached = CachedRequestData(["a"], [[]], [12], {})


def test_a_row_whose_masks_leave_nothing_draws_no_token(runner):
    params = CoreSamplingParams(max_tokens=4, seed=1, allowed_token_ids=(300, 301), bad_words=((300,), (301,)))
    masked = NewRequestData("a", PROMPTS["a"], [], params, BLOCKS["a"], 0)
    step = SchedulerOutput([masked, new("b")], CachedRequestData([], [], [], {}), {"a": 11, "b": 2}, 13, [], [])
    runner.execute(step)
    output = runner.sample()
    assert output.without_choice == ["a"]
    assert [len(token_ids) for token_ids in output.sampled_token_ids] == [0, 1]
