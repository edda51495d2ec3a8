"""Which steps come from graphs, and where graphs read and write."""

import gc
from collections import Counter, deque

import numpy as np
import pytest
import torch

from tests.gpu_worker.cuda.fake_cuda import FakeCuda
from tests.gpu_worker.cuda.host_rows import HostRowKernels
from tests.gpu_worker.cuda.late_link import LateLink
from tests.gpu_worker.cuda.late_platform import use_tensor_backend
from tests.gpu_worker.cuda.op_capture import OpCapture
from tests.gpu_worker.cuda.tensor_backend import TensorBackend
from tests.gpu_worker.sampler.device.host_draw import HostKernels
from tests.gpu_worker.test_model_runner import DEMO_MODEL, PARAMS, PROMPTS, begin, new
from tokenloom.engine_core.data.scheduler_output import await_output
from tokenloom.gpu_worker.batch.input_batch import InputBatch, StepInputs
from tokenloom.gpu_worker.cuda import step_tensors
from tokenloom.gpu_worker.cuda.device_steps import DeviceSteps, StepBuffers
from tokenloom.gpu_worker.cuda.step_graphs import StepGraphs, StepPlans, row_buckets, token_buckets
from tokenloom.gpu_worker.cuda.step_tensors import GraphCapture, StepSize, StepTensors, StepTools
from tokenloom.gpu_worker.device.device_link import copy_packed, to_device
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.process.fall_backs import OF_PROCESS

CPU = torch.device("cpu")


@pytest.fixture
def model(monkeypatch):
    use_tensor_backend(monkeypatch)
    return load_model(DEMO_MODEL, "float32", ops=TorchOps())


def make_steps(model, batch, capture, link=None):
    backend = TensorBackend(model.config, 16, CPU)
    tools = StepTools(link or LateLink(), HostRowKernels())
    return backend, DeviceSteps(batch, StepPlans(backend, [backend]), 48, CPU, tools, capture)


def make_runner(model, capture, link):
    batch = InputBatch(4, 128, 16)
    backend, steps = make_steps(model, batch, capture, link)
    parts = RunnerParts(device_sampler=DeviceSampler(HostKernels(), link), recordings=steps)
    return ModelRunner(model, backend, batch, 8, parts=parts)


def lives(runner, lag=0):
    """Chunks of a prompt next to decodes, an end whose row another request gets, and a return after a preemption.

    The tokens of a step are taken ``lag`` steps later.
    """
    tokens, pending = {name: list[int]() for name in PARAMS}, deque()
    num_drawn = Counter()

    def take(num_left):
        while len(pending) > num_left:
            output = await_output(pending.popleft())
            for name, drawn in zip(output.req_ids, output.sampled_token_ids, strict=True):
                tokens[name] += drawn

    def step(scheduled, **changes):
        pending.append(begin(runner, scheduled, **changes))
        num_drawn.update(name for name, count in scheduled.items() if count != 17)  # the first chunk of a prompt
        take(lag)

    def computed(name):
        return len(PROMPTS[name]) + num_drawn[name] - 1

    step({"a": 11}, news=[new("a")])
    step({"a": 1, "b": 2}, news=[new("b")], computed={"a": computed("a")})
    step({"a": 1, "b": 1, "c": 17}, news=[new("c")], computed={name: computed(name) for name in "ab"})
    step({"c": 23, "a": 1}, computed={"c": 17, "a": computed("a")}, finished=["b"])
    step({"a": 1, "c": 1}, computed={name: computed(name) for name in "ac"})
    step({"c": 1}, computed={"c": computed("c")}, preempted=["a"])
    take(1)  # the step in flight has no token of it
    known = PROMPTS["a"] + tokens["a"]
    step({"a": len(known), "c": 1}, computed={"a": 0, "c": computed("c")}, resumed={"a": known})
    step({"a": 1, "c": 1}, computed={name: computed(name) for name in "ac"})
    step({}, finished=["a", "c"])
    take(0)
    return tokens


@pytest.mark.parametrize("with_graphs", [False, True])
def test_the_same_tokens_as_on_the_host(model, with_graphs):
    expected = lives(ModelRunner(model, TensorBackend(model.config, 16, CPU), InputBatch(4, 128, 16), 8))
    capture, link = OpCapture(), LateLink()
    runner = make_runner(model, capture if with_graphs else None, link)
    assert lives(runner) == expected
    assert link.num_sends == 8, "one copy to the device a step"
    assert capture.num_replays == (8 if with_graphs else 0)


@pytest.mark.parametrize("with_graphs", [False, True])
def test_the_same_tokens_where_they_come_later_than_the_next_step(model, with_graphs, monkeypatch):
    link, unknown = LateLink(), []
    runner = make_runner(model, OpCapture() if with_graphs else None, link)
    compute = runner._recordings.compute
    monkeypatch.setattr(
        runner._recordings,
        "compute",
        lambda model, inputs, *rest, **options: (
            unknown.append(int((inputs.token_ids < 0).sum())) or compute(model, inputs, *rest, **options)
        ),
    )
    assert lives(runner, lag=1) == lives(make_runner(model, None, LateLink()))
    assert unknown == [0, 1, 2, 1, 2, 1, 1, 2]
    assert link.num_sends == len(unknown)


def test_a_step_that_draws_nothing_ends_with_the_device(model):
    link = LateLink()
    runner = make_runner(model, None, link)
    begin(runner, {"a": 11}, news=[new("a")])
    pending = begin(runner, {"c": 17}, news=[new("c")])
    assert link.num_done == 0
    assert pending.result().sampled_token_ids == [[]]
    assert link.num_done == 1, "what the device was given before is done, too"


def test_all_graphs_are_captured_ahead_and_replayed_in_place(model):
    capture = OpCapture()
    runner = make_runner(model, capture, LateLink())
    runner.record_ahead()
    assert len(capture.graphs) == len(row_buckets(4)) + len(token_buckets(48))
    places = [tensor.data_ptr() for tensor in tensors_of(runner)]
    lives(runner)
    assert len(capture.graphs) == len(row_buckets(4)) + len(token_buckets(48)), "none was captured for a request"
    assert [tensor.data_ptr() for tensor in tensors_of(runner)] == places
    assert capture.num_replays == 8
    runner.set_model(model)
    lives(runner)
    assert capture.num_replays == 16, "other weights have other graphs"
    assert len(capture.graphs) > len(row_buckets(4)) + len(token_buckets(48))


def test_graphs_are_captured_again_for_other_weights(model, monkeypatch):
    cuda, linear = FakeCuda(monkeypatch), torch.nn.functional.linear
    monkeypatch.setattr(step_tensors, "unowned", lambda tensor: tensor, raising=False)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: (cuda.multiply(), linear(*given))[1])
    runner = make_runner(model, GraphCapture(), LateLink())
    for _ in range(2):  # the start, and a reload or the end of a sleep
        runner.record_ahead()
        assert sum(cuda.graphs_of.values()) == len(row_buckets(4)) + len(token_buckets(48))
        runner.set_model(model)
        gc.collect()
        assert not cuda.graphs_of


class FailingCapture(OpCapture):
    """Cannot capture so many calls, the first ones."""

    def __init__(self, num_failures):
        super().__init__()
        self.num_left = num_failures

    def __call__(self, compute):
        compute()
        if self.num_left:
            self.num_left -= 1
            raise RuntimeError("CUDA error: out of memory")
        return super().__call__(compute)


def test_steps_that_cannot_be_captured_are_computed_one_operation_after_the_other(model):
    expected = lives(make_runner(model, None, LateLink()))
    most = len(row_buckets(4)) + len(token_buckets(48))
    for num_failures in (1, most):
        runner = make_runner(model, FailingCapture(num_failures), LateLink())
        runner.record_ahead()
        assert ("no_graph", "48 tokens: RuntimeError: CUDA error: out of memory") in [
            (kind, reason[:50]) for kind, reason in OF_PROCESS.own()
        ]
        capture = runner._recordings._graphs._capture
        assert len(capture.graphs) == most - num_failures
        assert lives(runner) == expected
        # The largest graph is that of no step here.
        assert capture.num_replays == (8 if num_failures == 1 else 0)
    runner.set_model(model)
    assert not OF_PROCESS.of("").get("no_graph"), "other weights may have more room"


def test_steps_whose_tokens_the_host_sorts_by_experts_have_no_graph(save_checkpoint, monkeypatch):
    use_tensor_backend(monkeypatch)
    model = load_model(save_checkpoint("qwen3_moe", vocab_size=2048), "float32", ops=TorchOps())
    capture = OpCapture()
    runner = make_runner(model, capture, LateLink())
    runner.record_ahead()
    await_output(begin(runner, {"a": 11}, news=[new("a")]))
    await_output(begin(runner, {"a": 1}, computed={"a": 11}))
    assert not capture.graphs, "a GPU captures nothing that waits for the host"
    assert (model.routes.counts().sum(1) == 12 * model.routes.top_k).all(), "no token of padding was computed"


def test_a_step_that_cannot_be_computed_is_no_step_without_a_graph(model, monkeypatch):
    runner = make_runner(model, FailingCapture(0), LateLink())
    monkeypatch.setattr(type(model), "compute_logits", lambda *_: torch.empty(0).view(1))
    with pytest.raises(RuntimeError, match="shape"):
        runner.record_ahead()


def tensors_of(runner):
    tensors = runner._recordings._tensors
    return [getattr(tensors, name) for name in StepTensors.__dataclass_fields__]


def inputs(num_tokens, num_requests, embeds=()):
    tokens, rows = np.zeros(num_tokens, dtype=np.int64), np.arange(num_requests)
    starts = np.append(rows, num_tokens).astype(np.int32)
    lengths = np.ones(num_requests, dtype=np.int32) * num_tokens
    return StepInputs([], rows, tokens, tokens, starts, lengths, rows[:, None], tokens, rows, embeds)


def test_steps_that_have_no_graph(model):
    capture = OpCapture()
    backend, steps = make_steps(model, InputBatch(4, 128, 16), capture)
    caches = backend.allocate(8)
    assert steps.compute(model, inputs(49, 2), caches) is None, "more tokens than a step may have"
    assert steps.compute(model, inputs(5, 5), caches) is None, "more requests than there are rows"
    width = model.config.hidden_size
    for changes in ({"adapted": True}, {"embeds": [(0, np.zeros((1, width), dtype=np.float32))]}):
        hidden, logits = steps.compute(
            model, inputs(2, 2, changes.get("embeds", ())), caches, adapted="adapted" in changes
        )
        assert len(hidden) == len(logits) == 2
    assert not capture.graphs
    assert steps.compute(model, inputs(2, 2), caches) is not None
    assert len(capture.graphs) == 1


def test_sizes_of_graphs():
    assert row_buckets(1) == [1]
    assert row_buckets(3) == [1, 2, 3]
    assert row_buckets(128) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128]
    assert token_buckets(20) == [20]
    assert token_buckets(100) == [32, 64, 96, 100]
    assert token_buckets(8192) == [32, 64, 96, 128, 192, 256, 384, 512]


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "is_decode", "bucket"),
    [(1, 1, True, 1), (9, 9, True, 16), (9, 5, False, 32), (33, 9, False, 64), (512, 16, False, 512)],
)
def test_a_step_takes_the_next_larger_graph(model, num_tokens, num_requests, is_decode, bucket):
    backend = TensorBackend(model.config, 16, CPU)
    plans, most = StepPlans(backend, [backend]), StepSize(2048, 16, 2064)
    graphs = StepGraphs(plans, StepTensors.allocate(most, 1, 8, CPU), OpCapture(), most)
    size = graphs.size_for(num_tokens, num_requests, is_decode=is_decode)
    assert size.step.tokens == bucket
    assert size.is_decode == is_decode
    # Each request may end with an entry that is not full.
    assert size.step.entries >= (num_requests if is_decode else num_requests + (num_tokens - num_requests) // 128)
    assert size in graphs.sizes
    assert graphs.size_for(513, 1, is_decode=False) is None
    assert graphs.size_for(17, 17, is_decode=True) is None
    assert graphs.size_for(40, 17, is_decode=False) is None


def arrays_of(step):
    return {
        "ids": np.arange(3) + step,
        "lens": np.arange(5, dtype=np.int32) * step,
        "tables": np.arange(6, dtype=np.int32).reshape(2, 3) + step,
        "none": np.zeros((0, 2), dtype=np.int32),
        "u": np.array([0.5 * step]),
    }


def test_one_copy_of_all_arrays() -> None:
    link = LateLink()
    buffers = StepBuffers(CPU, link)
    for step in range(5):
        arrays = arrays_of(step)
        sent = buffers.send(arrays)
        assert link.num_sends == step + 1
        for name, array in arrays.items():
            assert np.array_equal(sent[name].numpy(), array)
            assert sent[name].numpy().dtype == array.dtype
            assert sent[name].data_ptr() % 16 == 0
            array[...] = 0  # which the copy does not see
        assert sent["ids"].tolist() == [step, step + 1, step + 2]
        assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == 1


def test_there_is_room_for_a_long_prompt() -> None:
    buffers = StepBuffers(CPU, LateLink())
    for size in (10, 100_000, 10):
        ids = np.arange(size)
        assert np.array_equal(buffers.send({"ids": ids})["ids"].numpy(), ids)


def test_memory_is_written_again_only_after_its_copy() -> None:
    link = LateLink()
    buffers = StepBuffers(CPU, link)
    for step in range(3):
        link.fetch(torch.zeros(1), torch.ones(1))  # so that each event is still to come
        buffers.send(arrays_of(step))
    assert link.num_waits == 0
    buffers.send(arrays_of(3))
    assert link.num_waits == 1
    assert link.num_done == 1, "only the oldest copy was waited for"


def test_one_copy_of_several_arrays() -> None:
    arrays = [np.arange(3, dtype=np.int64), np.ones((2, 2), dtype=np.int32), np.zeros((0, 4), dtype=np.float64)]
    copies = copy_packed(arrays, CPU)
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(copy.numpy(), array)
        assert copy.numpy().dtype == array.dtype
        assert copy.data_ptr() % 16 == 0
    arrays[0][:] = 9
    assert copies[0].tolist() == [0, 1, 2]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_the_cpu_reads_the_array_itself() -> None:
    array = np.arange(4)
    tensor = to_device(array, CPU)
    array[0] = 7
    assert tensor[0] == 7
