"""``context_management`` of Anthropic's API: leaves old results of tools, and old reasoning, out of a conversation that
has grown long."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int
from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

from ..encoding.sse import encode_json
from ..records.generate_request import Chat, Encode

if TYPE_CHECKING:
    from ..records.media import MediaPart

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
_SLICE_BYTES: Final = 256 << 10
"""Decoded before other tasks of the event loop run: about a millisecond. A conversation may have 8 MiB."""
_split = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_turn = msgspec.json.Decoder(dict[str, Any]).decode
Turn = dict[str, Any]


async def _read_turns(written: Sequence[msgspec.Raw]) -> list[Turn]:
    turns, size = [], 0
    for each in written:
        turns.append(_read_turn(each))
        size += len(each)
        if size > _SLICE_BYTES:
            await asyncio.sleep(0)
            size = 0
    return turns


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
        split = _split(chat.messages_json) if self.edits else []
        written: list[bytes | msgspec.Raw] = [*split]
        turns = await _read_turns(split)
        for edit in self.edits:
            num_cleared, changed = edit.clear(turns, num_tokens)
            if not num_cleared:
                continue
            rewritten = [encode_json(changed[at]) if at in changed else each for at, each in enumerate(written)]
            edited = replace(chat, messages_json=b"[%b]" % b",".join(rewritten))
            if chat.media:
                edited = replace(edited, media=_left_of(chat.media, turns, changed))
            shorter = await encode(edited)
            if num_tokens - num_ids(shorter) < edit.at_least:
                continue
            report: dict[str, object] = {"type": edit.kind, edit.counted: num_cleared}
            self.applied.append(report | {"cleared_input_tokens": num_tokens - num_ids(shorter)})
            chat, prompt, num_tokens, written = edited, shorter, num_ids(shorter), rewritten
            turns = [changed.get(at, turn) for at, turn in enumerate(turns)]
        return chat, prompt


def _left_of(media: "Sequence[MediaPart]", turns: Sequence[Turn], changed: Mapping[int, Turn]) -> "list[MediaPart]":
    """Return the images that are left. ``changed``: the turns whose contents may have been cleared."""
    left: list[MediaPart] = []
    images = iter(media)
    for at, turn in enumerate(turns):
        content = turn.get("content")
        own = [next(images) for part in content if part["type"] == "image"] if isinstance(content, list) else []
        if own and changed.get(at, turn).get("content") == content:
            left += own
    return left


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

    def clear(self, turns: Sequence[Turn], num_tokens: int) -> tuple[int, dict[int, Turn]]:
        """Return how many old results are cleared, and the turns that change, by their places."""
        results = [at for at, turn in enumerate(turns) if turn["role"] == "tool"]
        if (len(results) if self.counts_uses else num_tokens) <= self.trigger:
            return 0, {}
        calls = {
            call.get("id"): (at, call["function"]["name"])
            for at, turn in enumerate(turns)
            for call in turn.get("tool_calls", ())
        }
        num_cleared, changed = 0, dict[int, Turn]()
        for at in results[: -self.keep or None]:
            call_id = turns[at].get("tool_call_id")
            caller, name = calls.get(call_id, (at, ""))
            if name in self.excluded or turns[at]["content"] == CLEARED:
                continue
            changed[at] = turns[at] | {"content": CLEARED}
            num_cleared += 1
            if caller != at and (self.inputs is True or (self.inputs and name in self.inputs)):
                changed[caller] = _without_input(changed.get(caller, turns[caller]), call_id)
        return num_cleared, changed


def _without_input(turn: Turn, call_id: object) -> Turn:
    """Return an answer whose call of this id has no arguments."""
    emptied = [
        call | {"function": call["function"] | {"arguments": {}}} if call.get("id") == call_id else call
        for call in turn["tool_calls"]
    ]
    return turn | {"tool_calls": emptied}


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

    def clear(self, turns: Sequence[Turn], num_tokens: int) -> tuple[int, dict[int, Turn]]:
        """Return of how many turns old reasoning is cleared, and these turns without it, by their places."""
        answers = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
        old = () if self.keep is None else answers[: -self.keep or None]
        changed = {
            at: {name: value for name, value in turns[at].items() if name != "reasoning_content"}
            for at in old
            if "reasoning_content" in turns[at]
        }
        return len(changed), changed


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
