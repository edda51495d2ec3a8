"""A chat so far, as the next request will tell it."""

import json
from pathlib import Path

Message = dict[str, str]


class Conversation:
    """Turns of user and assistant, the user's first, under an optional system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """In OpenAI's form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, text: str) -> None:
        """The user's turn."""
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The assistant's."""
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Forgets the last question, with its answer if it has one; returns the question, None when there is none."""
        while self._turns:
            turn = self._turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def clear(self) -> None:
        """Forgets all turns, not the system prompt."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. Raises ``OSError``."""
        path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: Path) -> None:
        """Takes the place of what was said. Raises ``OSError``, and ``ValueError`` for what `save` did not write."""
        messages = json.loads(path.read_text())
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
