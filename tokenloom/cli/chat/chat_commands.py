"""What a user can tell ``tokenloom chat`` itself: lines that begin with a slash."""

import difflib
from collections.abc import Callable
from pathlib import Path

from .conversation import Conversation

Handler = Callable[[Conversation, str], str]
"""Takes what follows the command's name; returns what to show."""


class EndOfChat(Exception):
    """The user wants to leave."""


class AskAgain(Exception):
    """The question in ``args[0]`` is to be asked anew."""


def run(line: str, conversation: Conversation) -> str:
    """Obeys a line such as ``/system Be brief.``; returns what to show. Raises `EndOfChat` or `AskAgain`."""
    name, _, argument = line.removeprefix("/").partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        return f"there is no /{name}" + (f"; did you mean /{near[0]}?" if near else "; /help lists what there is")
    return command[1](conversation, argument.strip())


def names() -> list[str]:
    """Every command, with its slash."""
    return [f"/{name}" for name in _COMMANDS]


def _help(conversation: Conversation, argument: str) -> str:
    lines = [f"  /{name:<8} {text}" for name, (text, _) in _COMMANDS.items()]
    return "\n".join([*lines, "  A line that ends with \\ goes on in the next; Ctrl-C stops an answer."])


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = argument
    return f"system prompt: {conversation.system or '(none)'}"


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "a new conversation"


def _history(conversation: Conversation, argument: str) -> str:
    lines = [f"{message['role']}: {message['content']}" for message in conversation.messages]
    return "\n".join(lines) or "nothing was said yet"


def _undo(conversation: Conversation, argument: str) -> str:
    question = conversation.take_back()
    return "nothing to take back" if question is None else f"taken back: {question}"


def _retry(conversation: Conversation, argument: str) -> str:
    question = conversation.take_back()
    if question is None:
        return "nothing was asked yet"
    raise AskAgain(question)


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "name a file: /save chat.json"
    try:
        conversation.save(Path(argument).expanduser())
    except OSError as error:
        return f"cannot write {argument}: {error.strerror}"
    return f"saved to {argument}"


def _load(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "name a file: /load chat.json"
    try:
        conversation.load(Path(argument).expanduser())
    except OSError as error:
        return f"cannot read {argument}: {error.strerror}"
    except ValueError as error:
        return f"{argument} is no saved chat: {error}"
    return f"{len(conversation.messages)} messages from {argument}"


def _exit(conversation: Conversation, argument: str) -> str:
    raise EndOfChat


_COMMANDS: dict[str, tuple[str, Handler]] = {
    "help": ("this list", _help),
    "system": ("show the system prompt, or set it to what follows", _system),
    "history": ("show what was said", _history),
    "undo": ("forget the last question and its answer", _undo),
    "retry": ("ask the last question again", _retry),
    "clear": ("forget everything but the system prompt", _clear),
    "save": ("write the conversation to a file", _save),
    "load": ("go on with a conversation from a file", _load),
    "exit": ("leave; Ctrl-D does too", _exit),
}
