"""Writes what models of a family write: calls come from the family's own chat template."""

import random
from typing import Any

from tests.services.gateway.formats.test_families import is_clear, rendered
from tests.services.tokenizer.families import form_of
from tests.soak.writer import Writer

_ONE_CALL = ("llama3_1",)
"""Families whose templates write one call in a turn."""
_KEYS = ("city", "a", "b_2", "x")


class FamilyWriter(Writer):
    """Draws texts and calls of a family."""

    names = _KEYS

    def __init__(self, rng: random.Random, family: str) -> None:
        super().__init__(rng, family)
        self._family = family
        self._form = form_of(family)

    def output(self, choice: str) -> str:
        rng, form = self._rng, self._form
        is_harmony = form.syntax == "messages"
        if choice != "auto" and not form.demands_calls:
            return ("" if is_harmony else self._thoughts()) + self._as_json(choice)
        if is_harmony:
            return self._messages()
        thoughts = self._thoughts()
        if choice != "auto":
            return thoughts + self._region(1 if choice != "required" else rng.randint(1, 3)).strip()
        calls = self._region(rng.randint(1, 3)) if rng.random() < 0.6 else ""
        if not form.is_marked:  # all of it is calls, or none
            return thoughts + (calls.strip() or self.words())
        before, after = (self.words() if rng.random() < 0.7 else "" for _ in range(2))
        return f"{thoughts}{before}{calls}{after}"

    def _messages(self) -> str:
        """Thoughts, and an answer or calls."""
        thoughts = f"<|channel|>analysis<|message|>{self._plain_words()}<|end|><|start|>assistant"
        if self._rng.random() < 0.5:
            return f"{thoughts}<|channel|>final<|message|>{self._plain_words()}<|return|>"
        return f"{thoughts}{self._region(self._rng.randint(1, 2))}"

    def _plain_words(self) -> str:
        return self.words().replace("<", "")

    def _region(self, count: int) -> str:
        """Some calls as the template writes them, and what it writes around them."""
        count = 1 if self._family in _ONE_CALL else count
        calls = [(self._name(), self._clear_object()) for _ in range(count)]
        return self._noted(lambda: rendered(self._family, calls))

    def _clear_object(self) -> dict[str, Any]:
        """Arguments that a format without escapes can write."""
        while not is_clear(self._form, found := self._object()):
            pass
        return found
