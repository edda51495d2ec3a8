"""Lists the lines of system prompts that clients change although the instructions stay the same, and takes them out of
requests or moves them.

A KV block is found again only if every token before it is the same. So one changed line at the beginning of a system
prompt costs the prefill of the whole conversation, in every turn.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class VolatileLine:
    """Describes a line that a client changes."""

    name: str
    """For the response header ``x-tokenloom-volatile``."""
    client: str
    """The client, for the documentation."""
    agents: tuple[bytes, ...]
    """Beginnings of the ``User-Agent`` of the client, whose requests are treated at every route."""
    pattern: re.Pattern[str]
    """Matches the line with its line break."""
    why: str
    """What changes in it, and when."""
    moves: bool = False
    """Whether it goes to the end of the system prompt, because the model needs it; otherwise it is taken out."""
    of_messages: bool = False
    """Whether it is taken out of every request of Anthropic's API, whatever the ``User-Agent``."""


VOLATILE_LINES = (
    VolatileLine(
        "claude-code.billing",
        "Claude Code, 2.1.15 and later",
        (b"claude-cli/",),
        # At the beginning of a text alone: a user's own instructions may speak of the header.
        re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)"),
        "`cch` is a hash of the request (2.1.330 sends it to Anthropic's hosts only), and `cc_version` ends with one "
        "of the conversation's beginning. The line is meant for Anthropic's billing.",
        of_messages=True,
    ),
    VolatileLine(
        "environment.date",
        "Claude Code, OpenCode",
        (b"claude-cli/", b"opencode/"),
        re.compile(r"^[ \t]*Today's date(?::| is) [^\n]{6,40}(?:\n|\Z)", re.MULTILINE),
        "The date, which changes at midnight, stands before the list of tools or the user's own instructions.",
        moves=True,
    ),
)
AGENTS = tuple({agent: None for line in VOLATILE_LINES for agent in line.agents})
"""Beginnings of the ``User-Agent`` of the clients that have such lines."""
OF_MESSAGES = tuple(line for line in VOLATILE_LINES if line.of_messages)

_ROLES = ("system", "developer")


def lines_of(agent: bytes, route: Sequence[VolatileLine] = ()) -> tuple[VolatileLine, ...]:
    """Return the lines to look for. ``agent``: the ``User-Agent``. ``route``: those of every request of the route."""
    return tuple(line for line in VOLATILE_LINES if line in route or agent.startswith(line.agents))


def settled(body: Mapping[str, Any], lines: Sequence[VolatileLine]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a body without the volatile lines of its system prompt, and the names of those that it had.

    The body was not checked: what is no system prompt of text stays as it is.
    """
    found: dict[str, None] = {}
    for field in ("system", "instructions", "messages", "input"):
        prompt, rest = _system_prompt(field, body.get(field))
        texts = list(_texts(prompt))
        if names := _settle(texts, lines):
            found |= dict.fromkeys(names)
            changed = _with_texts(prompt, iter(texts))
            body = {**body, field: [*changed, *rest] if rest else changed}
    return body, tuple(found)


def steady(text: str) -> str:
    """Return a text without any of the lines, to compare it with another one."""
    for line in VOLATILE_LINES:
        text = line.pattern.sub("", text)
    return text


def _settle(texts: list[str], lines: Sequence[VolatileLine]) -> tuple[str, ...]:
    """Change the texts of a system prompt; return the names of the lines that they had."""
    found: dict[str, None] = {}
    moved: list[str] = []
    for line in lines:
        for index, text in enumerate(texts):
            matches = line.pattern.findall(text)
            if not matches:
                continue
            found[line.name] = None
            texts[index] = line.pattern.sub("", text)
            if line.moves:
                moved += [match.strip() for match in matches]
    if moved:
        last = next((index for index in reversed(range(len(texts))) if texts[index]), len(texts) - 1)
        texts[last] = "\n".join((texts[last].rstrip("\n"), *moved)).lstrip("\n")
    return tuple(found)


def _system_prompt(field: str, value: Any) -> tuple[Any, list[Any]]:
    """Return the part of a field that is the system prompt, None if it has none, and the turns after it."""
    if field in ("system", "instructions"):
        return value, []
    if not isinstance(value, list):
        return None, []
    turns = (index for index, turn in enumerate(value) if not isinstance(turn, dict) or turn.get("role") not in _ROLES)
    end = next(turns, len(value))
    return value[:end], value[end:]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a text, of a list of blocks, or of a list of turns."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else ():
        yield from _texts(part.get(_member(part)) if isinstance(part, dict) else part)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """Return the value with other texts, in the order of :func:`_texts`, without the parts that have become empty."""
    if isinstance(value, str):
        return next(texts)
    if not isinstance(value, list):
        return value
    parts: list[Any] = []
    for part in value:
        before = part.get(_member(part)) if isinstance(part, dict) else part
        after = _with_texts(before, texts)
        if not before:
            parts.append(part)
        elif after:
            parts.append({**part, _member(part): after} if isinstance(part, dict) and before else after)
    return parts


def _member(part: Mapping[str, Any]) -> str:
    return "content" if "content" in part else "text"
