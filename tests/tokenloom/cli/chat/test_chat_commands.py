"""Lines that begin with a slash."""

from pathlib import Path

import pytest

from tokenloom.cli.chat import chat_commands
from tokenloom.cli.chat.conversation import Conversation


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation()
    conversation.ask("One?")
    conversation.answer("1")
    return conversation


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = chat_commands.run("/help", conversation)
    assert all(name in shown for name in chat_commands.names())


def test_an_unknown_command_names_the_nearest(conversation: Conversation) -> None:
    assert chat_commands.run("/histroy", conversation) == "unknown command /histroy; did you mean /history?"
    assert "/help" in chat_commands.run("/xyzzy", conversation)


def test_the_system_prompt_is_set_and_shown(conversation: Conversation) -> None:
    assert chat_commands.run("/system", conversation) == "system prompt: (none)"
    assert chat_commands.run("/system Be brief.", conversation) == "system prompt: Be brief."
    assert conversation.system == "Be brief."


def test_history_undo_and_clear(conversation: Conversation) -> None:
    assert chat_commands.run("/history", conversation) == "user: One?\nassistant: 1"
    assert chat_commands.run("/undo", conversation) == "removed: One?"
    assert chat_commands.run("/undo", conversation) == "nothing to undo"
    assert chat_commands.run("/clear", conversation) == "started a new conversation"
    assert chat_commands.run("/history", conversation) == "the conversation is empty"
    assert chat_commands.run("/retry", conversation) == "no question was asked yet"


def test_retry_and_exit_leave_the_line(conversation: Conversation) -> None:
    with pytest.raises(chat_commands.AskAgain, match=r"One\?"):
        chat_commands.run("/retry", conversation)
    with pytest.raises(chat_commands.EndOfChat):
        chat_commands.run("/exit", conversation)


def test_files_that_cannot_be_used_are_named(conversation: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    assert chat_commands.run(f"/save {path}", conversation) == f"saved to {path}"
    assert chat_commands.run(f"/load {path}", conversation) == f"2 messages loaded from {path}"
    path.write_text("{}")
    assert "not a saved chat" in chat_commands.run(f"/load {path}", conversation)
    assert "No such file" in chat_commands.run(f"/load {tmp_path}/nothing", conversation)
    assert "cannot write" in chat_commands.run(f"/save {tmp_path}", conversation)
    assert "name a file" in chat_commands.run("/save", conversation) + chat_commands.run("/load", conversation)
