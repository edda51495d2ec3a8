"""Turns of a chat."""

from pathlib import Path

import pytest

from tokenloom.cli.chat.conversation import Conversation


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation("Be brief.")
    conversation.ask("One?")
    conversation.answer("1")
    conversation.ask("Two?")
    conversation.answer("2")
    return conversation


def test_the_system_prompt_comes_first(conversation: Conversation) -> None:
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_a_question_is_taken_back_with_its_answer(conversation: Conversation) -> None:
    assert conversation.take_back() == "Two?"
    conversation.ask("Three?")
    assert [conversation.take_back(), conversation.take_back(), conversation.take_back()] == ["Three?", "One?", None]


def test_what_was_saved_is_loaded(conversation: Conversation, tmp_path: Path) -> None:
    conversation.save(tmp_path / "chat.json")
    other = Conversation()
    other.load(tmp_path / "chat.json")
    assert other.messages == conversation.messages


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '[{"role": "tool", "content": ""}]', '[{"role": "user"}]', "no JSON", "[" * 100_000]
)
def test_what_is_no_chat_is_refused(conversation: Conversation, tmp_path: Path, text: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    with pytest.raises(ValueError):
        conversation.load(tmp_path / "chat.json")
    assert len(conversation.messages) == 5
