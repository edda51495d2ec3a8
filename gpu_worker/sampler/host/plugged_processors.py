"""Logits processors of plugins: pure functions of the tokens so far, the request's own arguments and its seed.

They see rows and never the batch, so a request that was preempted, moved to another engine or resumed, and one whose
drafts are verified, draws the tokens that it would have drawn otherwise.

They run on the host, or where the logits lie: those that declare it, and vLLM's forms, which are written for that.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.process.argument_schemas import check_apart, check_schema, own_arguments
from tokenloom.process.plugins import load_all

from ...device.device_link import to_device
from .logits_processors import RowEdit

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]
_FAILURES = (Exception, SystemExit)
"""What the code of others may raise: an exit that it asks for would end the requests of everybody."""


class PluginRow(NamedTuple):
    """What a logits processor knows of one row. It must change nothing of it, and keep none of the lists.

    Attributes:
        prompt_token_ids: The tokens of the prompt; without those that embeddings, images or sounds replace.
        output_token_ids: The tokens of the output so far; only their number if it declares ``reads_output = False``.
        arguments: Those of the request's ``extra_args`` that the plugin declares, at least one; checked by its schema.
        seed: The request's, an unsigned integer of 64 bits.
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    arguments: Mapping[str, Any]
    seed: int


class CountedTokens(Sequence[int]):
    """Stands for the output of a row whose processor does not read it: its length is known, its tokens may still be on
    the device."""

    def __init__(self, num_tokens: int) -> None:
        self._num_appended = num_tokens
        self._num_expected = 0

    def append(self, token_id: int) -> None:
        """Count a token that has come to the host."""
        self._num_appended += 1

    def expect(self, num_tokens: int) -> None:
        """Take that there are so many tokens, some of which may come to the host later."""
        self._num_expected = num_tokens

    def __len__(self) -> int:
        return max(self._num_appended, self._num_expected)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a processor that declares reads_output = False has read a token of the output")


class PluggedProcessor(Protocol):
    """What a plugin of the kind ``logits_processors`` fulfils: the entry point names an object, or a class without
    parameters.

    It may have two attributes more. ``on_device = True``: ``apply`` gets a tensor on the engine's device, and a device
    that draws tokens draws those of its rows too. ``reads_output = False``: it asks for the length of the output only,
    so a step need not wait for the tokens of the one before. Without them it gets an array of the host, and all tokens.
    """

    arguments: Mapping[str, Any]
    """A JSON schema, whose properties are the names of the arguments. A request asks for the plugin by giving one."""

    def apply(self, logits: Any, rows: Sequence[PluginRow]) -> None:
        """Change ``logits`` [n, vocab], float32, in place; row i is that of ``rows[i]``.

        A pure function: equal rows give equal changes, whatever else is in the batch and whatever was called before.
        An error ends only the requests whose rows raise it. What others have forbidden (-inf) stays forbidden.
        """


class LogitsPlugin(NamedTuple):
    """A logits processor of a plugin that was loaded, with its schema as JSON and its ``PACKAGE:NAME``."""

    named: str
    schema: str
    processor: PluggedProcessor
    device: torch.device | None
    """Where it gets the logits, as a tensor; None: an array of the host."""
    reads_output: bool
    """Whether it looks at the tokens of the output, and not at their number alone."""


_HOST = torch.device("cpu")


def load_logits_plugins(plugins: Sequence[str], device: torch.device = _HOST) -> list[LogitsPlugin]:
    """Import the logits processors of these packages. ``device``: where tokens are drawn. Raises ``ValueError`` for one
    that does not fulfil the protocol, and for two that declare one argument."""
    found = [_plugin(each.named, each.value, device) for each in load_all("logits_processors", plugins)]
    check_apart({each.named: each.schema for each in found})
    return found


def _plugin(named: str, value: Any, device: torch.device) -> LogitsPlugin:
    try:
        if hasattr(value, "update_state"):
            processor: PluggedProcessor = VllmBatchForm(value, device)
        elif hasattr(value, "new_req_logits_processor"):
            processor = VllmRequestForm(value, device)
        else:
            processor = value() if isinstance(value, type) else value
        if not callable(getattr(processor, "apply", None)):
            raise ValueError("it has no method apply")
        schema = check_schema(processor.arguments)
        takes_tensors = _flag(processor, "on_device", default=False)
        reads_output = _flag(processor, "reads_output", default=True)
    except _FAILURES as error:  # whatever the code of others does when it is constructed
        raise ValueError(f"the plugin {named} (logits_processors): {error}") from error
    return LogitsPlugin(named, schema, processor, device if takes_tensors else None, reads_output)


def _flag(processor: Any, name: str, *, default: bool) -> bool:
    found = getattr(processor, name, default)
    if not isinstance(found, bool):
        raise ValueError(f"{name} must be True or False, not {found!r}")
    return found


class PluggedRows:
    """Fulfils :class:`.logits_processors.LogitsProcessor` for one plugin."""

    parameters: tuple[str, ...] = ("extra_args",)

    def __init__(self, plugin: LogitsPlugin) -> None:
        self._plugin = plugin
        self._is_on_device = plugin.device is not None
        self._rows: dict[int, PluginRow] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        own = own_arguments(params.extra_args or {}, self._plugin.schema)
        if own:  # otherwise the request asks for other plugins only
            reads = self._plugin.reads_output
            outputs = list(output_token_ids) if reads else CountedTokens(len(output_token_ids))
            self._rows[row] = PluginRow(tuple(prompt_token_ids), outputs, own, params.seed)

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    def append(self, row: int, token_id: int) -> None:
        if (known := self._rows.get(row)) is not None:
            known.output_token_ids.append(token_id)  # type: ignore[attr-defined]  # made above, and not the plugin's

    def follows_output(self, row: int) -> bool:
        return row in self._rows and self._plugin.reads_output

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if (known := self._rows.get(row)) is None:
            return
        if isinstance(known.output_token_ids, CountedTokens):
            known.output_token_ids.expect(output_index)
        if self._is_on_device:
            edit.is_plugged = True
        else:
            edit.on_host = True

    def apply_on_device(self, logits: Tensor, index_of: Mapping[int, int]) -> None:
        """Do what :meth:`apply` does with logits [n, vocab] where they lie, for a plugin that takes them there."""
        asking = [(index_of[row], known) for row, known in self._rows.items() if row in index_of]
        if asking:
            self._change_tensor(logits, [index for index, _ in asking], [known for _, known in asking])

    @torch.inference_mode()
    def _change_tensor(self, logits: Tensor, indices: list[int], rows: Sequence[PluginRow]) -> None:
        where = to_device(np.array(indices, dtype=np.int64), logits.device)
        try:
            logits[where] = self._changed_tensor(logits[where], rows)
        except _FAILURES:  # the rows are asked one by one, from what was there: the plugin got a copy
            for index, known in zip(indices, rows, strict=True):
                self._change_alone(logits[index : index + 1], known)

    def _changed_tensor(self, own: Tensor, rows: Sequence[PluginRow]) -> Tensor:
        forbidden = torch.isneginf(own)
        answer: object = self._plugin.processor.apply(own, rows)  # type: ignore[func-returns-value]
        if answer is not None and answer is not own:
            raise TypeError("apply must change the logits in place, and return nothing")
        return own.masked_fill_(forbidden, -torch.inf)

    def _change_alone(self, logits: Tensor, row: PluginRow) -> None:
        try:
            logits.copy_(self._changed_tensor(logits.clone(), [row]))
        except _FAILURES:
            log.exception("the plugin %s failed for a request, which ends", self._plugin.named)
            logits.fill_(torch.nan)

    def apply(self, logits: Logits, index_of: Mapping[int, int]) -> None:
        asking = [(index_of[row], known) for row, known in self._rows.items() if row in index_of]
        if not asking:
            return
        indices, rows = [index for index, _ in asking], [known for _, known in asking]
        if self._plugin.device is not None:
            own = torch.from_numpy(logits[indices]).to(self._plugin.device)
            self._change_tensor(own, list(range(len(rows))), rows)
            logits[indices] = own.cpu().numpy()
            return
        try:
            logits[indices] = self._changed(logits[indices], rows)
        except _FAILURES:
            for index, known in asking:
                logits[index] = self._changed_alone(logits[index], known)

    def _changed(self, logits: Logits, rows: Sequence[PluginRow]) -> Logits:
        # A copy, so that a plugin that fails half-way has changed nothing: the rows are asked one by one then.
        changed = logits.copy()
        change: Callable[[Logits, Sequence[PluginRow]], object] = self._plugin.processor.apply
        answer = change(changed, rows)
        if answer is not None and answer is not changed:
            raise TypeError("apply must change the logits in place, and return nothing")
        # A grammar ends a request whose token it does not accept, so what is masked stays masked.
        np.copyto(changed, -np.inf, where=np.isneginf(logits))
        return changed

    def _changed_alone(self, logits: Logits, row: PluginRow) -> Logits:
        try:
            changed: Logits = self._changed(logits[None], [row])[0]
            return changed
        except _FAILURES:
            # NaN ends this request, and no other one, with an error that names its logits.
            log.exception("the plugin %s failed for a request, which ends", self._plugin.named)
            return np.full_like(logits, np.nan)


class VllmParams(NamedTuple):
    """What vLLM's logits processors read of a request's sampling parameters."""

    extra_args: Mapping[str, Any]
    seed: int


class BatchUpdate(NamedTuple):
    """Tells a logits processor of vLLM's batch form which rows are others than in the last step, with vLLM's names."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, VllmParams, Sequence[int], Sequence[int]]]
    moved: Sequence[tuple[int, int, Any]]


class VllmBatchForm:
    """Wraps a class of vLLM's batch form (``update_state`` and ``apply``), which keeps a state of its rows.

    Whenever the rows are others than in the last call, it is told that all of them are new, with the tokens that they
    have by then: so what it does is a function of the rows again.
    """

    on_device = True
    """As in vLLM, whose processors get the device and its tensors."""

    def __init__(self, form: Any, device: torch.device) -> None:
        """``form``: the class, whose constructor takes vLLM's configuration, for which it gets None, the device and
        whether memory is pinned."""
        self.arguments: Mapping[str, Any] = form.arguments
        self.reads_output = getattr(form, "reads_output", True)
        self._processor = _construct(form, device)
        self._rows: list[PluginRow] = []
        self._num_outputs: list[int] = []

    def apply(self, logits: Tensor, rows: Sequence[PluginRow]) -> None:
        self._processor.update_state(self._update(rows))
        self._rows, self._num_outputs = list(rows), [len(row.output_token_ids) for row in rows]
        _write(logits, self._processor.apply(logits))

    def _update(self, rows: Sequence[PluginRow]) -> BatchUpdate | None:
        # As in vLLM, it knows the list of a row's output, which grows by one token from step to step.
        grown = [count + 1 for count in self._num_outputs]
        is_same = len(rows) == len(self._rows) and all(map(_is_same, rows, self._rows))
        if is_same and [len(row.output_token_ids) for row in rows] == grown:
            return None
        added = [
            (index, VllmParams(row.arguments, row.seed), list(row.prompt_token_ids), row.output_token_ids)
            for index, row in enumerate(rows)
        ]
        # A row that another one replaces is not removed too: vLLM's own processors take what was removed out last.
        return BatchUpdate(len(rows), list(range(len(rows), len(self._rows))), added, [])


def _is_same(one: PluginRow, other: PluginRow) -> bool:
    return one.output_token_ids is other.output_token_ids


class VllmRequestForm:
    """Wraps a class of vLLM's adapter for processors of single requests (``new_req_logits_processor``)."""

    on_device = True

    def __init__(self, form: Any, device: torch.device) -> None:
        self.arguments: Mapping[str, Any] = form.arguments
        self.reads_output = getattr(form, "reads_output", True)
        self._make = _construct(form, device)

    def apply(self, logits: Tensor, rows: Sequence[PluginRow]) -> None:
        for index, row in enumerate(rows):
            change = self._make.new_req_logits_processor(VllmParams(row.arguments, row.seed))
            if change is not None:
                own = logits[index]
                _write(own, change(*_tokens_for(change, row), own))


def _construct(form: Any, device: torch.device) -> Any:
    return form(None, device, device.type == "cuda") if isinstance(form, type) else form


def _tokens_for(change: Callable[..., Any], row: PluginRow) -> tuple[Sequence[int], ...]:
    """Return the lists of tokens that a function of one request takes before the logits: the output's, or the prompt's
    and the output's."""
    takes_prompt = len(inspect.signature(change).parameters) > 2
    known = row.output_token_ids
    outputs = known if isinstance(known, CountedTokens) else list(known)
    return (list(row.prompt_token_ids), outputs) if takes_prompt else (outputs,)


def _write(logits: Tensor, changed: object) -> None:
    """Take what a processor returned, which may have changed the logits in place or made others."""
    if not isinstance(changed, torch.Tensor):
        raise TypeError(f"a processor of logits returned {type(changed).__name__}, not a tensor")
    if changed.shape != logits.shape:  # torch would repeat one row in all
        raise ValueError(f"a processor of logits returned the shape {list(changed.shape)}, not {list(logits.shape)}")
    if changed is not logits:
        logits.copy_(changed)
