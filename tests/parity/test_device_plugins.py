"""Logits processors of plugins that take the logits where they lie: the tokens of the host's form, drawn on the device,
on one that is behind the host, with so few blocks that requests are preempted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu_worker.cuda.late_platform import LatePlatform, use_tensor_backend
from tests.parity.test_async_scheduling import BUDGET, PROMPTS, core_of
from tests.plugin_packages import install
from tokenloom import LLM, SamplingParams
from tokenloom.gpu_worker import devices
from tokenloom.gpu_worker.sampler.step_sampler import StepSampler

SOURCE = '''
import torch

TYPES = []

def schema(name):
    return {"properties": {name: {"type": "integer", "minimum": 1}}}

class Array:
    """On the host."""
    arguments = schema("array")

    def apply(self, logits, rows):
        TYPES.append(type(logits).__name__)
        for logit, row in zip(logits, rows, strict=True):
            (step,) = row.arguments.values()
            if step == 13:
                logit[:] = 0.0
                raise RuntimeError("thirteen")
            total = sum(row.prompt_token_ids) + 3 * self.total(row.output_token_ids) + row.seed % 7
            logit[total * step % len(logit)] += 9

    def total(self, outputs):
        return sum(outputs) + len(outputs)

class Tensor(Array):
    arguments, on_device = schema("tensor"), True

class ArrayLength(Array):
    arguments, reads_output = schema("array_length"), False

    def total(self, outputs):
        return len(outputs)

class TensorLength(ArrayLength):
    arguments, on_device = schema("tensor_length"), True

class Liar(Tensor):
    """Reads what it declares not to read."""
    arguments, reads_output = schema("liar"), False

class OfVllm(Tensor):
    """In vLLM's batch form."""
    arguments = schema("vllm")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        if update is not None:
            for index, params, prompt, output in update.added:
                self.rows[index] = (params, prompt, output)
            for index in update.removed:
                del self.rows[index]

    def apply(self, logits):
        TYPES.append(type(logits).__name__)
        for index, (params, prompt, output) in self.rows.items():
            total = sum(prompt) + 3 * self.total(output) + params.seed % 7
            logits[index, total * params.extra_args["vllm"] % logits.shape[1]] += 9
        return logits
'''
FORMS = {"array": "Array", "tensor": "Tensor", "array_length": "ArrayLength", "tensor_length": "TensorLength",
         "liar": "Liar", "vllm": "OfVllm"}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("packages")
    points = {name: f"acme_device:{form}" for name, form in FORMS.items()}
    install(directory, "acme-device", {"tokenloom.logits_processors": points}, SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        use_tensor_backend(patch)
        patch.setattr(devices, "CPUPlatform", LatePlatform)
        made = LLM("tokenloom-demo", dtype="float32", max_model_len=256, max_num_seqs=12,
                   max_num_batched_tokens=BUDGET, num_gpu_blocks_override=20, attention_backend="torch",
                   async_scheduling=True, max_logprobs=-1, plugins=["acme-device"])  # fmt: skip
        yield made
        made.close()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows were drawn on the host, and how many steps waited for their tokens."""
    counts = {"rows": 0, "waits": 0}
    draw, finish = StepSampler._draw_on_host, StepSampler._finish

    def counted(self: StepSampler, inputs: Any, places: np.ndarray, *others: Any) -> Any:
        counts["rows"] += len(places)
        return draw(self, inputs, places, *others)

    def waiting(self: StepSampler, *arguments: Any) -> Any:
        counts["waits"] += 1
        return finish(self, *arguments)

    monkeypatch.setattr(StepSampler, "_draw_on_host", counted)
    monkeypatch.setattr(StepSampler, "_finish", waiting)
    return counts


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 1},
    {"seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"seed": 8, "logit_bias": {300: 4.0, 301: -100.0}, "allowed_token_ids": list(range(100, 1600))},
    {"temperature": 0.0, "seed": 2, "logprobs": 3},
    {"seed": 5, "stop_token_ids": list(range(300, 900, 3)), "min_tokens": 3},
]


def types() -> list[str]:
    import acme_device  # type: ignore[import-not-found]

    found: list[str] = acme_device.TYPES
    return found


def generate(llm: LLM, form: str | None) -> list[tuple[list[int], list[float]]]:
    """The tokens of every kind of request, half of which ask for the form, and their log probabilities."""
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, extra_args={form: 1 + index} if form and index % 5 else None,
                       **KINDS[index % len(KINDS)])
        for index in range(12)
    ]  # fmt: skip
    core_of(llm).reset_prefix_cache()
    outputs = llm.generate([PROMPTS[index % len(PROMPTS)] for index in range(12)], params, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    assert not any(output.error for output in outputs)
    return [(list(each.token_ids), [next(iter(at.values())).logprob for at in each.logprobs or []]) for each in found]


@pytest.mark.parametrize(
    ("form", "same_as", "waits"),
    [("tensor", "array", True), ("vllm", "array", True), ("tensor_length", "array_length", False)],
)
def test_the_device_draws_the_tokens_of_the_hosts_form(
    llm: LLM, on_host: dict[str, int], form: str, same_as: str, waits: bool
) -> None:
    plain = generate(llm, None)
    assert on_host == {"rows": 0, "waits": 0}
    before = core_of(llm).scheduler.stats().num_preemptions
    expected = generate(llm, same_as)
    assert on_host["rows"] > 100
    assert sum(one != other for one, other in zip(plain, expected, strict=True)) > 6, "the form changes tokens"
    on_host.update(rows=0, waits=0)
    types().clear()
    found = generate(llm, form)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, wanted) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, wanted, atol=1e-5)
    assert core_of(llm).scheduler.stats().num_preemptions > before + 1
    assert on_host["rows"] == 0
    assert (on_host["waits"] > 0) == waits, "a step waits only where a plugin reads tokens"
    assert len(types()) > 20
    assert set(types()) == {"Tensor"}


@pytest.mark.parametrize(("form", "step"), [("tensor", 13), ("liar", 2)])
def test_a_failure_on_the_device_ends_its_own_rows(llm: LLM, on_host: dict[str, int], form: str, step: int) -> None:
    """Also one that reads tokens which it has declared not to read."""
    asked: list[dict[str, int] | None] = [{"tensor": 2}, {form: step}, None]
    each = [SamplingParams(max_tokens=8, seed=1, ignore_eos=True, extra_args=extra) for extra in asked]
    outputs = llm.generate(PROMPTS[:3], each, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "a plugin that its extra_args ask for has failed" in str(outputs[1].error)
    assert on_host["rows"] == 0


def test_log_probabilities_that_the_device_does_not_list_come_to_the_host(llm: LLM, on_host: dict[str, int]) -> None:
    """Such a row is drawn there, and its processors are still those of the device."""
    found = []
    for form in ("array", "tensor"):
        own = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, logprobs=-1, extra_args={form: 3})
        beside = SamplingParams(max_tokens=8, seed=2, ignore_eos=True, extra_args={form: 4})
        on_host.update(rows=0)
        outputs = llm.generate(PROMPTS[:2], [own, beside], use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        assert on_host["rows"] == (16 if form == "array" else 8)
    assert found[0] == found[1]
