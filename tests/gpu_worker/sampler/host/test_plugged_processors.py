"""Logits processors of plugins: pure functions of a row, whatever else is in the batch."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host import plugged_processors
from tokenloom.gpu_worker.sampler.host.logits_processors import LogitsProcessors, make_logits_processors
from tokenloom.gpu_worker.sampler.host.plugged_processors import (
    BatchUpdate,
    LogitsPlugin,
    PluggedRows,
    PluginRow,
    load_logits_plugins,
)
from tokenloom.process.plugins import LoadedPlugin

VOCAB = 32
SCHEMA = {"properties": {"step": {"type": "integer", "minimum": 1}}}


def favoured(row: PluginRow) -> int:
    """The token that the processors of these tests favour."""
    total = sum(row.prompt_token_ids) + 3 * sum(row.output_token_ids) + len(row.output_token_ids) + row.seed % 7
    return int(total * row.arguments["step"] % VOCAB)


class Favour:
    """Adds to the logit of one token, which follows from all that a row has."""

    arguments = SCHEMA

    def __init__(self) -> None:
        self.calls: list[int] = []

    def apply(self, logits: np.ndarray, rows: Sequence[PluginRow]) -> None:
        self.calls.append(len(rows))
        for logit, row in zip(logits, rows, strict=True):
            if row.arguments["step"] == 13:
                logit[:] = 0.0
                raise RuntimeError("thirteen")
            logit[favoured(row)] += 50


class BatchForm:
    """The same in vLLM's batch form: it keeps its rows, and the lists of their outputs."""

    arguments = SCHEMA

    def __init__(self, vllm_config: None, device: torch.device, is_pin_memory: bool) -> None:
        assert (vllm_config, device.type, is_pin_memory) == (None, "cpu", False)
        self.rows: dict[int, PluginRow] = {}
        self.num_updates = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.num_updates += 1
            # In the order of vLLM's `process_dict_updates` and of the example in its documentation.
            for index, params, prompt, output in batch_update.added:
                assert isinstance(prompt, list)
                self.rows[index] = PluginRow(prompt, output, params.extra_args, params.seed)
            for index in batch_update.removed:
                self.rows.pop(index, None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for index, row in self.rows.items():
            changed[index, favoured(row)] += 50
        return changed


class RequestForm:
    """The same in vLLM's form of single requests."""

    arguments = SCHEMA

    def __init__(self, vllm_config: None, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def new_req_logits_processor(self, params: Any) -> Any:
        def change(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[favoured(PluginRow(prompt, output, params.extra_args, params.seed))] += 50
            return logits

        return change


class OutputForm(RequestForm):
    """One whose functions take the output only."""

    def new_req_logits_processor(self, params: Any) -> Any:
        if params.extra_args["step"] == 2:
            return None

        def change(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[len(output)] = 99.0
            return logits

        return change


def load(monkeypatch: pytest.MonkeyPatch, *values: Any) -> list[LogitsPlugin]:
    found = [LoadedPlugin(f"acme:{index}", value) for index, value in enumerate(values)]
    monkeypatch.setattr(plugged_processors, "load_all", lambda kind, names: found)
    return load_logits_plugins(("acme",))


def batch_of(plugin: LogitsPlugin) -> LogitsProcessors:
    return make_logits_processors([PluggedRows(plugin)])


def params(step: int | None, seed: int = 1, **values: Any) -> CoreSamplingParams:
    extra: Mapping[str, int] | None = None if step is None else {"step": step}
    return CoreSamplingParams(max_tokens=99, seed=seed, extra_args=extra, **values)


def apply(processors: LogitsProcessors, rows: Sequence[int]) -> list[list[float]]:
    logits = np.zeros((len(rows), VOCAB), np.float32)
    processors.apply(logits, np.array(rows))
    return logits.tolist()


def course(processors: LogitsProcessors, row: int, count: int) -> list[int]:
    """Tokens of one row, each the largest logit."""
    tokens = []
    for _ in range(count):
        (logits,) = apply(processors, [row])
        tokens.append(int(np.argmax(logits)))
        processors.append(np.array([row]), np.array(tokens[-1:]))
    return tokens


FORMS = [Favour, BatchForm, RequestForm]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_gets_the_same_alone_in_a_batch_and_after_a_preemption(
    monkeypatch: pytest.MonkeyPatch, form: type
) -> None:
    (plugin,) = load(monkeypatch, Favour)
    expected = {}
    for row in range(4):
        alone = batch_of(plugin)
        assert alone.add(row, params(row + 1, seed=row), [row, 5, 6], 3)
        expected[row] = course(alone, row, 12)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4

    (plugin,) = load(monkeypatch, form)
    processors, tokens = batch_of(plugin), {row: list[int]() for row in range(4)}
    for row in (2, 0, 3):
        processors.add(row, params(row + 1, seed=row), [row, 5, 6], 3)
    processors.add(9, params(None), [1], 1)
    live = [3, 0, 9, 2]
    for step in range(12):
        if step == 4:  # preempted, and another one comes
            processors.remove(0)
            processors.add(1, params(2, seed=1), [1, 5, 6, *expected[1][:4]], 3)
            tokens[1] = expected[1][:4]
            live = [9, 2, 1, 3]
        if step == 6:
            processors.add(0, params(1, seed=0), [0, 5, 6, *tokens[0]], 3)
            live = [0, 1, 2, 3, 9]
        logits = apply(processors, live)
        assert not any(logits[live.index(9)]), "a row that asks for nothing"
        drawn = [int(np.argmax(row)) for row in logits]
        processors.append(np.array(live), np.array(drawn))
        for row, token in zip(live, drawn, strict=True):
            if row != 9:
                tokens[row].append(token)
    for row in range(4):
        assert tokens[row] == expected[row][: len(tokens[row])]
        assert len(tokens[row]) >= 10


def test_the_batch_form_is_told_of_rows_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, BatchForm)
    processors = batch_of(plugin)
    processors.add(0, params(3), [1, 2], 2)
    course(processors, 0, 5)
    form = plugin.processor._processor  # type: ignore[attr-defined]
    assert form.num_updates == 1
    apply(processors, [0])  # the same step once more, as a draft that was wrong makes it
    apply(processors, [0])
    assert form.num_updates >= 2


def test_functions_of_the_output_alone_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, OutputForm)
    processors = batch_of(plugin)
    processors.add(0, params(1), [1, 2, 7], 2)
    processors.add(1, params(2), [1, 2, 7], 2)
    first, second = apply(processors, [0, 1])
    assert first[1] == 99.0
    assert not any(second)


def test_a_failure_ends_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, Favour)
    processors = batch_of(plugin)
    for row, step in enumerate((1, 13, 2)):
        processors.add(row, params(step), [3], 1)
    first, failed, third = apply(processors, [0, 1, 2])
    assert max(first) == max(third) == 50
    assert np.isnan(failed).all()


class Returned(Favour):
    """Leaves its logits as they are, and returns others."""

    def apply(self, logits: np.ndarray, rows: Sequence[PluginRow]) -> Any:
        return logits + 1


class Exits(Favour):
    def apply(self, logits: np.ndarray, rows: Sequence[PluginRow]) -> None:
        raise SystemExit(3)


class OneRow(BatchForm):
    """Returns one row for all, which numpy would repeat."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return super().apply(logits)[0]


class NoTensor(BatchForm):
    def apply(self, logits: torch.Tensor) -> Any:
        return super().apply(logits).tolist()


@pytest.mark.parametrize("form", [Returned, Exits, OneRow, NoTensor])
def test_what_a_processor_may_not_do_ends_its_rows_only(monkeypatch: pytest.MonkeyPatch, form: type) -> None:
    (plugin,) = load(monkeypatch, form)
    processors = batch_of(plugin)
    processors.add(0, params(1), [3], 1)
    processors.add(1, params(2), [3], 1)
    processors.add(2, params(None, min_tokens=3), [3], 1)
    first, second, plain = apply(processors, [0, 1, 2])
    assert np.isnan(first).all()
    assert np.isnan(second).all()
    assert not np.isnan(plain).any()


def test_what_is_forbidden_stays_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, Favour)
    processors = batch_of(plugin)
    processors.add(0, params(1, seed=0, allowed_token_ids=(4, 5)), [3], 1)
    (logits,) = apply(processors, [0])
    assert [token for token, logit in enumerate(logits) if logit > -np.inf] == [4, 5]


def test_a_device_leaves_such_rows_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, Favour)
    processors = batch_of(plugin)
    processors.add(0, params(1), [3], 1)
    processors.add(1, params(None, min_tokens=3), [3], 1)
    assert processors.follow_output(np.array([0]))
    assert not processors.follow_output(np.array([1]))
    assert processors.describe(0, 0).on_host
    assert not processors.describe(1, 0).on_host


def test_rows_that_do_not_ask_call_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin,) = load(monkeypatch, Favour)
    processors = batch_of(plugin)
    assert not processors.add(0, params(None), [3], 1)
    apply(processors, [0])
    processors.add(1, params(None, min_tokens=2), [3], 1)
    apply(processors, [0, 1])
    assert plugin.processor.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([type("Plain", (), {"arguments": SCHEMA})], r"acme:0 \(logits_processors\): it has no method apply"),
        ([type("Bad", (Favour,), {"arguments": {}})], "must be an object with properties"),
        ([type("Bad", (Favour,), {"__init__": lambda self, size: None})], "missing 1 required positional argument"),
        ([type("Bad", (Favour,), {"__init__": lambda self: sys.exit(3)})], r"acme:0 \(logits_processors\): 3"),
        ([Favour, BatchForm], "the plugins acme:0 and acme:1 both declare the argument step"),
    ],
)
def test_a_processor_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, values: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(monkeypatch, *values)
