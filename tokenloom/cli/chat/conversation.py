"""A conversation at a terminal, and the commands that act on it."""

import base64
import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenloom.model_files.model_path import expanded

Message = dict[str, Any]


class Conversation:
    """Holds the turns of user and assistant after an optional system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The messages in OpenAI's form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, text: str, media: Sequence[Message] = ()) -> None:
        """Add the user's turn. ``media``: parts that stand before its text."""
        content: Any = text
        if media:
            content = [*media, {"type": "text", "text": text}]
        self._turns.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Add the assistant's turn."""
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question and its answer; return the question, or None if the conversation has none."""
        while self._turns:
            turn = self._turns.pop()
            if turn["role"] == "user":
                return _text_of(turn["content"])
        return None

    def clear(self) -> None:
        """Remove all turns but keep the system prompt."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises ``OSError``."""
        path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: Path) -> None:
        """Replace the messages by those of a file. Raises ``OSError``, or ``ValueError`` for another content."""
        try:
            messages = json.loads(path.read_text())
        except RecursionError:
            raise ValueError("its brackets are nested too deeply") from None
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise ValueError("expected a list of messages, each with a role and a content")
        self.system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        self._turns = [message for message in messages if message["role"] != "system"]


def image_part(path: Path) -> Message:
    """Return the part of a turn that shows an image. Raises ``OSError``."""
    # Encoders read the type of an image from the file itself.
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(path)}"}}


def video_part(path: Path) -> Message:
    """Return the part of a turn that shows a video. Raises ``OSError``."""
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{_base64(path)}"}}


def sound_part(path: Path) -> Message:
    """Return the part of a turn that plays a sound. Raises ``OSError``."""
    return {"type": "input_audio", "input_audio": {"data": _base64(path), "format": path.suffix[1:].lower() or "wav"}}


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant")
        and (
            isinstance(content := value.get("content"), str) or (isinstance(content, list) and value["role"] == "user")
        )
    )


Handler = Callable[[Conversation, str], str]
"""Takes the conversation and the command's argument; returns the text to show."""


class EndOfChat(Exception):
    """The user wants to leave."""


class AskAgain(Exception):
    """The question in ``args[0]`` must be asked again."""


def run_command(line: str, conversation: Conversation) -> str:
    """Execute a line such as ``/system Be brief.``; return the text to show. Raises `EndOfChat` or `AskAgain`."""
    name, _, argument = line.removeprefix("/").partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        return f"unknown command /{name}" + (f"; did you mean /{near[0]}?" if near else "; /help lists the commands")
    return command[1](conversation, argument.strip())


def command_names() -> list[str]:
    """Return every command with its slash."""
    return [f"/{name}" for name in _COMMANDS]


def _help(conversation: Conversation, argument: str) -> str:
    lines = [f"  /{name:<8} {text}" for name, (text, _) in _COMMANDS.items()]
    return "\n".join([*lines, "  A line that ends with \\ continues on the next one; Ctrl-C stops an answer."])


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = argument
    return f"system prompt: {conversation.system or '(none)'}"


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "started a new conversation"


def _history(conversation: Conversation, argument: str) -> str:
    lines = [f"{message['role']}: {message['content']}" for message in conversation.messages]
    return "\n".join(lines) or "the conversation is empty"


def _undo(conversation: Conversation, argument: str) -> str:
    question = conversation.take_back()
    return "nothing to undo" if question is None else f"removed: {question}"


def _retry(conversation: Conversation, argument: str) -> str:
    question = conversation.take_back()
    if question is None:
        return "no question was asked yet"
    raise AskAgain(question)


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "name a file: /save chat.json"
    try:
        conversation.save(expanded(argument))
    except OSError as error:
        return f"cannot write {argument}: {error.strerror}"
    return f"saved to {argument}"


def _load(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "name a file: /load chat.json"
    try:
        conversation.load(expanded(argument))
    except OSError as error:
        return f"cannot read {argument}: {error.strerror}"
    except ValueError as error:
        return f"{argument} is not a saved chat: {error}"
    return f"{len(conversation.messages)} messages loaded from {argument}"


def _exit(conversation: Conversation, argument: str) -> str:
    raise EndOfChat


_COMMANDS: dict[str, tuple[str, Handler]] = {
    "help": ("show this list", _help),
    "system": ("show the system prompt, or set it to the argument", _system),
    "history": ("show the conversation", _history),
    "undo": ("remove the last question and its answer", _undo),
    "retry": ("ask the last question again", _retry),
    "clear": ("remove everything except the system prompt", _clear),
    "save": ("write the conversation to a file", _save),
    "load": ("continue a conversation from a file", _load),
    "exit": ("leave, as Ctrl-D does", _exit),
}
