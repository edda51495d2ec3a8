"""Attention of libraries, of which there are stand-ins, over the caches and lists that Triton's kernels write."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention import stand_ins
from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, make_step, run_rule, shape
from tests.gpu_worker.cuda.late_link import LateLink
from tests.gpu_worker.kernels.triton.test_step_graphs import Replays, generate
from tests.gpu_worker.platform.cuda_tensors import on_cuda
from tokenloom.gpu_worker.attention import library_backends
from tokenloom.gpu_worker.attention.attention_backend import FP8_KV, ScoreRule
from tokenloom.gpu_worker.attention.library_backends import FlashAttnBackend, FlashInferBackend, make_library_backend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES
from tokenloom.gpu_worker.cuda.device_steps import make_device_steps
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

__all__ = ("on_cuda",)

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 64
SINKS = torch.linspace(-2, 4, HEADS)
RULES = {
    "plain": ScoreRule(0.125),
    "window": ScoreRule(0.5, 17),
    "softcap": ScoreRule(0.5, None, softcap=3.0),
    "both": ScoreRule(0.5, 17, softcap=3.0),
    "sinks": ScoreRule(0.5, 17, sinks=SINKS),
}


@pytest.fixture
def libraries(monkeypatch):
    return stand_ins.install(monkeypatch)


# FlashInfer is refused for models with sinks.
KNOWN = [(each, rule) for each in (FlashInferBackend, FlashAttnBackend) for rule in RULES]
KNOWN.remove((FlashInferBackend, "sinks"))


@pytest.mark.parametrize(("backend", "rule"), KNOWN)
@pytest.mark.parametrize("batch", ["one decode", "decodes of many lengths", "prefills", "decodes between prefills"])
def test_equals_the_reference(libraries, backend, batch, rule):
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE)
    step = make_step(*BATCHES[batch], HEADS, config)
    expected, expected_cache = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, RULES[rule])
    found, cache = run_rule(backend(config, BLOCK_SIZE, CPU), step, RULES[rule])
    assert torch.equal(cache, expected_cache)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    inferring, attending = libraries
    if backend is FlashAttnBackend:
        assert attending.calls["run"] == 1
    else:
        kind = "decode" if "decode" in batch and "between" not in batch else "prefill"
        assert inferring.calls == {"plan": 1, "run": 1, kind: 1}


def test_flashinfer_reads_floats_of_8_bits(libraries):
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE, FP8_KV)
    step = make_step(*BATCHES["decodes between prefills"], HEADS, config)
    expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, RULES["window"])
    found, _ = run_rule(FlashInferBackend(config, BLOCK_SIZE, CPU), step, RULES["window"])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_layers_of_a_kind_share_a_division(libraries):
    """Each kind of layer divides a step once; the wrappers stay for later steps."""
    inferring, _ = libraries
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE)
    backend, step = FlashInferBackend(config, BLOCK_SIZE, CPU), make_step([1, 1], [40, 20], HEADS, config)
    for _ in range(3):
        plan = backend.plan(**step.arrays)
        for rule in ("plain", "window", "plain", "window"):
            plan.attend(step.query, step.cache, RULES[rule])
    assert inferring.calls == {"plan": 6, "decode": 6, "run": 12}
    assert len(inferring.made) == 2


def test_memory_of_a_division_is_written_again_only_after_its_copy(libraries, monkeypatch):
    link = LateLink()
    monkeypatch.setattr(library_backends, "link_of", lambda device: link)
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE)
    backend, step = FlashInferBackend(config, BLOCK_SIZE, CPU), make_step([1], [40], HEADS, config)
    for number in range(3):
        link.fetch(torch.zeros(1), torch.ones(1))  # so that each event is still to come
        backend.plan(**step.arrays).attend(step.query, step.cache, RULES["plain"])
        assert link.num_waits == number


@pytest.mark.parametrize("count", [1, 3, 300])
def test_the_list_of_pages(libraries, count):
    """More requests than one turn of the kernel reads, and padding behind some."""
    lengths = np.arange(count) % 70 + 1
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE)
    step = make_step([1] * count, lengths.tolist(), HEADS, config)
    plan = FlashInferBackend(config, BLOCK_SIZE, CPU).plan(**step.arrays)
    counts = -(-lengths // BLOCK_SIZE)
    expected = [block for row, n in zip(step.arrays["block_tables"].tolist(), counts, strict=True) for block in row[:n]]
    assert plan._pages[: len(expected)].tolist() == expected
    assert plan._lengths.page_starts.tolist() == np.cumsum([0, *counts]).tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # rows of padding, which nothing reads
@pytest.mark.parametrize("backend", [FlashInferBackend, FlashAttnBackend])
def test_the_same_tokens_with_graphs(libraries, backend, save_checkpoint, monkeypatch):
    model = load_model(save_checkpoint("qwen3", num_hidden_layers=2, head_dim=64), "float32", ops=TritonOps())
    expected = generate(model, lambda backend, batch: None)
    link = LateLink()
    monkeypatch.setattr("tests.gpu_worker.kernels.triton.test_step_graphs.TritonBackend", backend)
    captures = [Replays(), None]
    for capture in captures:
        made = lambda backend, batch, capture=capture: make_device_steps(  # noqa: E731
            backend, batch, 40, CPU, StepTools(link, TritonRowKernels()), capture
        )
        assert generate(model, made) == expected
    assert link.num_sends == 8, "one copy of ours to the device a step"
    inferring, attending = libraries
    if backend is FlashAttnBackend:
        assert (captures[0].num_captures, captures[0].num_replays) == (3, 4)
        assert attending.calls["run"] > 0
        return
    # The prompts have no graph; then come steps of 3, 3 and 2 requests, the first two of the same graph.
    assert (captures[0].num_captures, captures[0].num_replays) == (2, 3)
    # With graphs: the prompts, and each graph when it is captured and each time before it is replayed.
    assert inferring.calls["prefill"] == 2
    assert inferring.calls["decode"] == (2 + 3) + 3
    assert len(inferring.made) == (1 + 2) + (1 + 1)


def test_flashinfer_gets_lengths_on_the_host_and_the_rest_on_the_gpu(libraries, on_cuda, monkeypatch):
    """The stand-in asserts where the arrays lie. No kernel of ours runs on tensors without an address."""
    launched = []
    monkeypatch.setattr(library_backends, "launch", lambda kernel, grid, *args, **constants: launched.append(grid))
    monkeypatch.setattr(library_backends, "link_of", lambda device: LateLink())
    config = shape(KV_HEADS, torch.float16, HEADS, SIZE)
    step = make_step([1, 1], [16, 16], HEADS, config)
    backend = FlashInferBackend(config, BLOCK_SIZE, on_cuda)
    plan = backend.plan(**step.arrays)
    pages = torch.from_numpy(step.arrays["block_tables"][:, 0].copy())
    plan._pages[:2] = pages.to(on_cuda)
    found = plan.attend(step.query.to(on_cuda), step.cache.to(on_cuda), RULES["plain"])
    assert found.device == plan._pages.device == on_cuda
    assert launched == [(2,)]
    expected = torch.empty_like(step.query)
    rule = 0.125, None, 0.0, None
    stand_ins.attend_paged(
        step.query, *step.cache.unbind(), [0, 1, 2], [[int(each)] for each in pages], [16, 16], *rule, expected
    )
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("error", [ImportError("no libcudart.so"), AttributeError("no flash_attn_varlen_func")])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_does_not_work_is_named(name, error, monkeypatch):
    def fail(module):
        raise error

    monkeypatch.setattr(library_backends, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(ValueError, match=rf"attention_backend {name}: the library .* here \(.*: no .*\); choose auto"):
        make_library_backend(name, shape(KV_HEADS, torch.float16, HEADS, SIZE), BLOCK_SIZE, CPU)
