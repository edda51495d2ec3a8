"""Lines that begin with a slash."""

from pathlib import Path

import pytest

from tokenloom.cli.chat.conversation import AskAgain, Conversation, EndOfChat, command_names, run_command


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation()
    conversation.ask("One?")
    conversation.answer("1")
    return conversation


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = run_command("/help", conversation)
    assert all(name in shown for name in command_names())


def test_an_unknown_command_names_the_nearest(conversation: Conversation) -> None:
    assert run_command("/histroy", conversation) == "unknown command /histroy; did you mean /history?"
    assert "/help" in run_command("/xyzzy", conversation)


def test_the_system_prompt_is_set_and_shown(conversation: Conversation) -> None:
    assert run_command("/system", conversation) == "system prompt: (none)"
    assert run_command("/system Be brief.", conversation) == "system prompt: Be brief."
    assert conversation.system == "Be brief."


def test_history_undo_and_clear(conversation: Conversation) -> None:
    assert run_command("/history", conversation) == "user: One?\nassistant: 1"
    assert run_command("/undo", conversation) == "removed: One?"
    assert run_command("/undo", conversation) == "nothing to undo"
    assert run_command("/clear", conversation) == "started a new conversation"
    assert run_command("/history", conversation) == "the conversation is empty"
    assert run_command("/retry", conversation) == "no question was asked yet"


def test_retry_and_exit_leave_the_line(conversation: Conversation) -> None:
    with pytest.raises(AskAgain, match=r"One\?"):
        run_command("/retry", conversation)
    with pytest.raises(EndOfChat):
        run_command("/exit", conversation)


def test_files_that_cannot_be_used_are_named(conversation: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    assert run_command(f"/save {path}", conversation) == f"saved to {path}"
    assert run_command(f"/load {path}", conversation) == f"2 messages loaded from {path}"
    path.write_text("{}")
    assert "not a saved chat" in run_command(f"/load {path}", conversation)
    assert "No such file" in run_command(f"/load {tmp_path}/nothing", conversation)
    assert "cannot write" in run_command(f"/save {tmp_path}", conversation)
    assert "name a file" in run_command("/save", conversation) + run_command("/load", conversation)
