"""Renders chat templates in a process that can be killed: ``python -m tokenloom.services.tokenizer.render_worker``.

The process exchanges msgpack over its pipe: first ``RenderSetup``, answered by a ``RenderReply`` without text, then one
``RenderReply`` for each ``RenderJob``. Its memory is limited, and a job that exceeds its processor time, or has not
been done after a much longer time, ends the process.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from tokenloom.process import helper_pipe
from tokenloom.process.helper_pipe import LENGTH
from tokenloom.request.tool_format import to_json

from .chat_template import ChatTemplate, MaskingTemplate, TemplateRefused, TemplateTooLong
from .spelled_tokens import TokenFinder
from .template_probe import probe_forms
from .tool_probe import NotDerived, derive


class RenderSetup(TypedDict):
    """Carries the template and the limits; the first message."""

    source: str
    special_tokens: dict[str, str]
    control_tokens: list[str]
    parsed_marks: list[str]
    memory_bytes: int
    seconds: float
    """Of processor time, for a job: its own, however busy the machine is."""
    wait_seconds: float
    """For a job, and for the start."""


class RenderJob(TypedDict):
    """Carries a conversation to render, as the unparsed JSON of the request."""

    messages_json: str
    tools_json: str
    template_kwargs_json: str
    add_generation_prompt: bool
    continue_final_message: bool


class RenderReply(TypedDict, total=False):
    """Carries a text with its masks, or one of the other fields; in answer to ``RenderSetup`` only ``tool_format``."""

    tool_format: bytes
    """How the template writes calls, as a message carries it; missing if no description fits."""
    text: str
    masks: Mapping[str, str]
    reasoning_start: str
    refused: str
    too_long: str


def pack(reply: RenderReply) -> bytes:
    """Encode an answer. Raises ``UnicodeEncodeError`` when it contains half a surrogate pair."""
    return msgspec.msgpack.encode(reply)  # a text of 6 MB as JSON kept the service's event loop busy for 0.15 s


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    if (first := helper_pipe.read_message()) is None:
        return
    setup: RenderSetup = msgspec.msgpack.decode(first)
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    helper_pipe.limit_time(0, setup["wait_seconds"])
    try:
        template = ChatTemplate(setup["source"], setup["special_tokens"])
        template.forms = probe_forms(template)
        masking = MaskingTemplate(template, TokenFinder(setup["control_tokens"]), setup["parsed_marks"])
    except (ValueError, MemoryError, RecursionError) as error:
        reason = _printable(str(error) or "Compiling the chat template takes too much memory.")
        helper_pipe.write_message(pack(RenderReply(refused=reason)))
        return
    helper_pipe.write_message(pack(_derived(template)))
    read, write = sys.stdin.buffer.read, sys.stdout.buffer.write
    while True:
        # As `helper_pipe` does all this, written out: each chat passes here, and its road is not to grow.
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            if len(header := read(LENGTH.size)) < LENGTH.size:
                return
            job: RenderJob = msgspec.msgpack.decode(read(*LENGTH.unpack(header)))
            signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
            signal.setitimer(signal.ITIMER_REAL, setup["wait_seconds"])
            reply = _answer(masking, job)
            write(LENGTH.pack(len(reply)) + reply)
            sys.stdout.buffer.flush()
        except MemoryError:
            os._exit(helper_pipe.OUT_OF_MEMORY)


def _derived(template: ChatTemplate) -> RenderReply:
    try:
        return RenderReply(tool_format=to_json(derive(template)))
    except (NotDerived, MemoryError, RecursionError):
        return RenderReply()


def _answer(template: MaskingTemplate, job: RenderJob) -> bytes:
    try:
        messages, tools, kwargs = job["messages_json"], job["tools_json"], job["template_kwargs_json"]
        conversation = _objects(messages)
        if job["continue_final_message"] and not conversation:
            raise ValueError("there is no final message to continue")
        rendered = template.render(
            conversation,
            [] if tools in {"", "[]"} else _objects(tools),
            {} if kwargs in {"", "{}"} else _objects(f"[{kwargs}]")[0],
            messages + tools + kwargs,
            add_generation_prompt=job["add_generation_prompt"],
            continue_final_message=job["continue_final_message"],
        )
        return pack(RenderReply(text=rendered.text, masks=rendered.masks, reasoning_start=rendered.reasoning_start))
    except TemplateRefused as error:
        return pack(RenderReply(refused=_printable(str(error))))
    except TemplateTooLong as error:
        return pack(RenderReply(too_long=str(error)))
    except MemoryError:
        return pack(RenderReply(too_long="Rendering the conversation took too much memory."))
    except UnicodeEncodeError:
        return pack(RenderReply(refused="The messages contain half a surrogate pair, which is not a character."))
    except (ValueError, RecursionError) as error:
        return pack(RenderReply(refused=f"The messages are not the expected JSON: {_printable(str(error))}"))


def _objects(text: str) -> list[dict[str, Any]]:
    """Return what a JSON list of objects holds. Raises ``ValueError`` for any other JSON."""
    values = json.loads(text)
    if not isinstance(values, list):
        raise ValueError(f"a list of objects is expected, not {type(values).__name__}")
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"a list of objects is expected, but it has {type(value).__name__}")
    return values


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()[:1000]


if __name__ == "__main__":
    main()
