"""Logits processors of plugins on a device whose tensors the host cannot read: they change what the host's would."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_worker.platform.cuda_tensors import CUDA, CudaTensor, on_cuda
from tests.gpu_worker.sampler.device.host_draw import HostKernels
from tests.gpu_worker.sampler.device.sampling_steps import VOCAB, Steps, bitmask, check_equal
from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.device.device_link import HostLink
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.host import plugged_processors
from tokenloom.gpu_worker.sampler.host.plugged_processors import LogitsPlugin, PluginRow, load_logits_plugins
from tokenloom.gpu_worker.sampler.step_sampler import StepSampler
from tokenloom.process.plugins import LoadedPlugin

__all__ = ("on_cuda",)


def schema(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "integer", "minimum": 1}}}


class Double:
    """Doubles the logits and favours a token, so that what comes before and after it matters."""

    arguments, on_device = schema("double"), True

    def __init__(self) -> None:
        self.rows: list[tuple[type, int]] = []

    def apply(self, logits: Any, rows: Sequence[PluginRow]) -> None:
        self.rows.append((type(logits), len(rows)))
        logits *= 2
        for logit, row in zip(logits, rows, strict=True):
            (step,) = row.arguments.values()
            if step == 13:
                raise RuntimeError("thirteen")
            logit[(sum(row.output_token_ids) + step) % VOCAB] += 3


class Add(Double):
    """Follows the other in the order of plugins."""

    arguments = schema("add")

    def apply(self, logits: Any, rows: Sequence[PluginRow]) -> None:
        self.rows.append((type(logits), len(rows)))
        logits += 1
        logits[:, ::2] += 1


class OnHost(Add):
    arguments, on_device = schema("on_host"), False


class CudaKernels(HostKernels):
    """Computes on the host what the device holds."""

    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        return super().draw(logits.cpu(), [each.cpu() for each in columns]).to(CUDA)

    def change(self, logits: Tensor, edits: Sequence[Tensor], seen: Tensor) -> None:
        on_host = logits.cpu()
        super().change(on_host, [each.cpu() for each in edits], seen.cpu())
        logits.copy_(on_host)

    def count(self, seen: Tensor, edits: Sequence[Tensor], drawn: Tensor) -> None:
        on_host = seen.cpu()
        super().count(on_host, [each.cpu() for each in edits], drawn.cpu())
        seen.copy_(on_host)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each draw of the host had."""
    counts, draw = [], StepSampler._draw_on_host

    def counted(self: StepSampler, inputs: Any, places: Any, *others: Any) -> Any:
        counts.append(len(places))
        return draw(self, inputs, places, *others)

    monkeypatch.setattr(StepSampler, "_draw_on_host", counted)
    return counts


def load(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[LogitsPlugin]:
    found = [LoadedPlugin(f"acme:{index}", value) for index, value in enumerate((Double, Add, OnHost))]
    monkeypatch.setattr(plugged_processors, "load_all", lambda kind, names: found)
    return load_logits_plugins(("acme",), device)


REQUESTS: list[Mapping[str, Any]] = [
    {"temperature": 0.0, "extra_args": {"add": 1}},
    {"temperature": 0.0, "extra_args": {"add": 1, "double": 2}},
    {"temperature": 1.0, "extra_args": {"double": 1}, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"temperature": 1.0, "extra_args": {"double": 2}, "logit_bias": {3: 5.0}, "allowed_token_ids": (3, 4, 90)},
    {"temperature": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0},
]


def run_both(
    monkeypatch: pytest.MonkeyPatch, requests: Sequence[Mapping[str, Any]], grammar: GrammarOutput | None = None
) -> tuple[list[LogitsPlugin], Any]:
    plugins = load(monkeypatch, CUDA)
    device = Steps(list(requests), DeviceSampler(CudaKernels(), HostLink()), "cuda", plugins=plugins)
    host = Steps(list(requests), None, plugins=load(monkeypatch, torch.device("cpu")))
    for _ in range(4):
        found = device.run(grammar)
        check_equal(found, host.run(grammar))
    return plugins, found


def test_rows_on_the_device_get_the_hosts_tokens(
    monkeypatch: pytest.MonkeyPatch, on_cuda: torch.device, hosted: list[int]
) -> None:
    """With penalties after the plugins, and masks and biases before them."""
    plugins, _ = run_both(monkeypatch, REQUESTS)
    assert hosted == [len(REQUESTS)] * 4, "of the host's own steps"
    double, add = (plugin.processor for plugin in plugins[:2])
    assert double.rows == [(CudaTensor, 3)] * 4  # type: ignore[attr-defined]
    assert add.rows == [(CudaTensor, 2)] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("forced", [{}, {"r1": 7, "r2": 7}])
def test_grammars_come_before_plugins_and_forced_tokens_after(
    monkeypatch: pytest.MonkeyPatch, on_cuda: torch.device, hosted: list[int], forced: dict[str, int]
) -> None:
    _, found = run_both(monkeypatch, REQUESTS, GrammarOutput(["r1"], bitmask(5, 7, 9), forced))
    assert found.sampled_token_ids[1][0] in (5, 7, 9)
    assert not forced or found.sampled_token_ids[1:3] == [[7], [7]]
    assert len(hosted) == 4


def test_one_processor_of_the_host_brings_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, on_cuda: torch.device, hosted: list[int]
) -> None:
    """The others of that row still get what they take, on the device."""
    mixed = {"temperature": 0.0, "extra_args": {"double": 1, "on_host": 1}, "presence_penalty": 0.5}
    plugins, _ = run_both(monkeypatch, [*REQUESTS, mixed])
    assert hosted == [1, len(REQUESTS) + 1] * 4
    double, _, on_host = (plugin.processor for plugin in plugins)
    assert double.rows == [(CudaTensor, 3), (CudaTensor, 1)] * 4  # type: ignore[attr-defined]
    assert {kind.__name__ for kind, _ in on_host.rows} == {"ndarray"}  # type: ignore[attr-defined]


def test_a_failure_ends_its_own_row(monkeypatch: pytest.MonkeyPatch, on_cuda: torch.device, hosted: list[int]) -> None:
    failing = {"temperature": 0.0, "extra_args": {"double": 13}}
    _, found = run_both(monkeypatch, [*REQUESTS, failing])
    assert found.without_finite_logit == [f"r{len(REQUESTS)}"]
    assert len(hosted) == 4


@pytest.mark.parametrize("name", ["on_device", "reads_output"])
def test_a_declaration_that_is_no_boolean_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Add, name, "no", raising=False)
    with pytest.raises(ValueError, match=f"acme:1 .*{name} must be True or False, not 'no'"):
        load(monkeypatch, torch.device("cpu"))
