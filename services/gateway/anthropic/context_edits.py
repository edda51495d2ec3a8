"""``context_management`` of Anthropic's API: leaves old results of tools, and old reasoning, out of a conversation that
has grown long."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int
from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

from ..encoding.sse import encode_json
from ..records.generate_request import Chat, Encode

TOOL_USES: Final = "clear_tool_uses_20250919"
THINKING: Final = "clear_thinking_20251015"
COMPACT: Final = "compact_20260112"
FIELD: Final = "context_management"
CLEARED: Final = "(This result was removed to make room in the context.)"
"""Stands in the place of a tool's result."""
DEFAULT_TRIGGER: Final = 100_000
"""Tokens of a prompt beyond which results of tools are cleared."""
DEFAULT_KEEP: Final = 3
"""Tool uses that stay."""
MOST_EDITS: Final = 8
"""Each may encode the conversation again."""
_MOST: Final = 2**31
_read_turns = msgspec.json.Decoder(list[dict[str, Any]]).decode


@dataclass(slots=True)
class ContextEdits:
    """Applies the edits of one request.

    Attributes:
        applied: What was cleared, as the answer reports it.
        num_tokens: Of the prompt as the client sent it; 0 until it is known.
    """

    edits: Sequence["ToolUses | Thinking"]
    applied: list[dict[str, object]] = field(default_factory=list)
    num_tokens: int = 0

    async def run(self, chat: Chat, encode: Encode) -> tuple[Chat, TokenizedPrompt]:
        """Return the conversation that the model is to see, and its tokens. ``encode``: renders a conversation."""
        prompt = await encode(chat)
        self.num_tokens = num_tokens = num_ids(prompt)
        for edit in self.edits:
            turns = _read_turns(chat.messages_json)
            if not (num_cleared := edit.clear(turns, num_tokens)):
                continue
            edited = replace(chat, messages_json=encode_json(turns))
            shorter = await encode(edited)
            if num_tokens - num_ids(shorter) < edit.at_least:
                continue
            report: dict[str, object] = {"type": edit.kind, edit.counted: num_cleared}
            self.applied.append(report | {"cleared_input_tokens": num_tokens - num_ids(shorter)})
            chat, prompt, num_tokens = edited, shorter, num_ids(shorter)
        return chat, prompt


@dataclass(frozen=True, slots=True)
class ToolUses:
    """Clears the results of tools.

    Attributes:
        keep: How many of the latest ones stay.
        trigger: Tokens of the prompt, or uses of tools, beyond which they are cleared.
        counts_uses: Whether the trigger counts uses.
        excluded: Tools whose results stay.
        inputs: Tools whose arguments are cleared too; True: of all.
        at_least: Tokens that must become free; otherwise nothing is cleared.
    """

    keep: int
    trigger: int
    counts_uses: bool
    excluded: Collection[str]
    inputs: Collection[str] | bool
    at_least: int
    kind = TOOL_USES
    counted = "cleared_tool_uses"

    def clear(self, turns: Sequence[dict[str, Any]], num_tokens: int) -> int:
        """Clear old results; return how many."""
        calls = {call.get("id"): call for turn in turns for call in turn.get("tool_calls", ())}
        results = [turn for turn in turns if turn["role"] == "tool"]
        if (len(results) if self.counts_uses else num_tokens) <= self.trigger:
            return 0
        num_cleared = 0
        for result in results[: -self.keep or None]:
            call = calls.get(result.get("tool_call_id"), {"function": {"name": ""}})
            name = call["function"]["name"]
            if name in self.excluded or result["content"] == CLEARED:
                continue
            result["content"] = CLEARED
            num_cleared += 1
            if self.inputs is True or (self.inputs and name in self.inputs):
                call["function"]["arguments"] = {}
        return num_cleared


@dataclass(frozen=True, slots=True)
class Thinking:
    """Clears the reasoning of answers.

    Attributes:
        keep: How many of the latest answers keep theirs; None: all.
    """

    keep: int | None
    at_least = 0
    kind = THINKING
    counted = "cleared_thinking_turns"

    def clear(self, turns: Sequence[dict[str, Any]], num_tokens: int) -> int:
        """Clear old reasoning; return of how many turns."""
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        old = () if self.keep is None else answers[: -self.keep or None]
        return sum(turn.pop("reasoning_content", None) is not None for turn in old)


def read_edits(value: object) -> ContextEdits | None:
    """Return the edits that a request asks for; None: it asks for none.

    Raises ``InvalidArgument`` naming the member.
    """
    if value is None:
        return None
    edits = value.get("edits", ()) if isinstance(value, Mapping) else None
    if not isinstance(edits, Sequence) or not all(isinstance(edit, Mapping) for edit in edits):
        raise InvalidArgument(f"{FIELD}.edits must be a list of edits", f"{FIELD}.edits")
    if len(edits) > MOST_EDITS:
        raise InvalidArgument(
            f"{FIELD}.edits has {len(edits)} edits; at most {MOST_EDITS} are allowed", f"{FIELD}.edits"
        )
    return ContextEdits([edit for index, each in enumerate(edits) for edit in _edit(f"{FIELD}.edits[{index}]", each)])


def ignored_edits(value: object) -> Iterator[str]:
    """Yield the edits that have no effect. The request was checked."""
    for edit in value.get("edits", ()) if isinstance(value, Mapping) else ():
        if edit.get("type") == COMPACT:
            yield f"{FIELD}.edits[].{COMPACT}"


def _edit(where: str, edit: Mapping[str, Any]) -> Iterator["ToolUses | Thinking"]:
    kind = edit.get("type")
    if kind == TOOL_USES:
        trigger = _counted(f"{where}.trigger", edit.get("trigger"), ("input_tokens", "tool_uses"), DEFAULT_TRIGGER)
        yield ToolUses(
            keep=_counted(f"{where}.keep", edit.get("keep"), ("tool_uses",), DEFAULT_KEEP),
            trigger=trigger,
            counts_uses=(edit.get("trigger") or {}).get("type") == "tool_uses",
            excluded=_names(f"{where}.exclude_tools", edit.get("exclude_tools")),
            inputs=value if isinstance(value := edit.get("clear_tool_inputs"), bool) else _names(where, value),
            at_least=_counted(f"{where}.clear_at_least", edit.get("clear_at_least"), ("input_tokens",), 0),
        )
    elif kind == THINKING:
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        is_all = keep == "all" or (isinstance(keep, Mapping) and keep.get("type") == "all")
        yield Thinking(None if is_all else _counted(f"{where}.keep", keep, ("thinking_turns",), 1))
    elif kind != COMPACT:
        message = f"{where}.type must be {TOOL_USES}, {THINKING} or {COMPACT}"
        raise InvalidArgument(message, f"{where}.type")


def _counted(where: str, value: object, kinds: Sequence[str], default: int) -> int:
    """Return the number in ``{"type": …, "value": …}``."""
    if value is None:
        return default
    if not isinstance(value, Mapping) or value.get("type") not in kinds:
        raise InvalidArgument(f'{where} must be {{"type": {" or ".join(kinds)}, "value": …}}', where)
    return narrow_int(f"{where}.value", value.get("value"), 0, _MOST)


def _names(where: str, value: object) -> Collection[str]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidArgument(f"{where} must be a list of names of tools", where)
    return frozenset(value)
