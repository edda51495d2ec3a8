"""The messages of a chat, as the next request sends them."""

import json
from pathlib import Path

Message = dict[str, str]


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

    def ask(self, text: str) -> None:
        """Add the user's turn."""
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the assistant's turn."""
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question and its answer; return the question, or None if the conversation has none."""
        while self._turns:
            turn = self._turns.pop()
            if turn["role"] == "user":
                return turn["content"]
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


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant")
        and isinstance(value.get("content"), str)
    )
