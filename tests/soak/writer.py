"""Draws what models write: texts, thoughts and calls, also such as are cut or malformed."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

WORD = re.compile(r"w\d+")
"""A word: each is another one."""


class Writer:
    """Draws what a model writes. Every word is another one, so that a lost one is noticed.

    Attributes:
        in_arguments: The words of calls.
    """

    names: Sequence[str] = ("city", "a", "b c", "é")
    """Of arguments."""

    def __init__(self, rng: random.Random, parser: str) -> None:
        """``parser``: of the model's calls."""
        self._rng = rng
        self._parser = parser
        self._num_words = 0
        self.in_arguments: set[str] = set()

    def words(self, most: int = 4) -> str:
        count = self._rng.randint(1, most)
        self._num_words += count
        marks = ("", "", ".", "\n", " é", " 🙂", " <b>", ' "', " {", " \\")
        numbers = range(self._num_words - count, self._num_words)
        return " ".join(f"w{number}{self._rng.choice(marks)}" for number in numbers)

    def output(self, choice: str) -> str:
        """Draw an answer. ``choice``: of the tools, as a client makes it."""
        rng = self._rng
        thoughts = self._thoughts()
        if choice != "auto" and self._parser == "hermes":  # forced calls have the marks of the model
            return thoughts + "\n".join(self._call() for _ in range(rng.randint(1, 3) if choice == "required" else 1))
        if choice != "auto" and self._parser == "mistral":
            return thoughts + self._as_json(choice)
        if choice != "auto":
            made = [self._made("parameters") for _ in range(rng.randint(1, 3) if choice == "required" else 1)]
            return thoughts + "; ".join(made)
        if self._parser == "llama3_json":  # all of it is calls, or none
            made = [self._made("parameters") for _ in range(rng.randint(0, 2))]
            return thoughts + ("; ".join(made) or self.words())
        parts = []
        for _ in range(rng.randint(0, 4)):
            is_call = rng.random() < 0.5
            parts.append(self._call() if is_call else rng.choice(("", "\n", " ")) + self.words())
        return thoughts + "".join(parts)

    def _thoughts(self) -> str:
        return f"<think>{self.words()}</think>" if self._rng.random() < 0.4 else ""

    def _as_json(self, choice: str) -> str:
        """Calls that are demanded, where the form of the model cannot be."""
        if choice != "required":
            return self._noted(self._arguments)
        return f"[{', '.join(self._made('parameters') for _ in range(self._rng.randint(1, 3)))}]"

    def _call(self) -> str:
        if self._parser == "mistral":
            if self._rng.random() < 0.5:
                return f"[TOOL_CALLS]{self._name()}[ARGS]{self._noted(lambda: json.dumps(self._object()))}"
            made = [self._made("arguments") for _ in range(self._rng.randint(1, 2))]
            return f"[TOOL_CALLS] [{', '.join(made)}]"
        name, arguments = json.dumps(self._name()), self._noted(self._arguments)
        space = self._rng.choice(("\n", "", " "))
        return f'<tool_call>{space}{{"name": {name}, "arguments": {arguments}}}{space}</tool_call>'

    def _made(self, member: str) -> str:
        """A call as an object, whose arguments are in this member."""
        arguments = self._noted(lambda: json.dumps(self._object(), ensure_ascii=self._rng.random() < 0.5))
        return f'{{"name": "{self._name()}", "{member}": {arguments}}}'

    def _noted(self, draw: Callable[[], str]) -> str:
        """Draw arguments, and note their words."""
        arguments = draw()
        self.in_arguments.update(WORD.findall(arguments))
        return arguments

    def _name(self) -> str:
        return self._rng.choice(("get_weather", "list_files"))

    def _arguments(self) -> str:
        """JSON, mostly of an object that can be read."""
        rng = self._rng
        whole = json.dumps(self._object(), ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.75:
            return whole
        wrong = (
            "[]",
            f'["{self._plain()}"]',
            f'{{"a": NaN, "b": "{self._plain()}"}}',
            f'{{"a": "{self._plain()}\n{self._plain()}"}}',
            f'{{"a": "{self._plain()}",}}',
            f'{{"a": 1e999, "b": "{self._plain()}"}}',
            f'{{"a": "\\ud83d {self._plain()}"}}',
            f'{{"a": 123456789012345678901234567890, "b": "{self._plain()}"}}',
            f'"{self._plain()}"',
            "7",
        )
        return rng.choice(wrong)

    def _plain(self) -> str:
        self._num_words += 1
        return f"w{self._num_words - 1}"

    def _object(self, depth: int = 0) -> dict[str, Any]:
        return {name: self._value(depth) for name in self._rng.sample(self.names, self._rng.randint(0, 3))}

    def _value(self, depth: int) -> Any:
        kind = self._rng.randrange(7 if depth < 3 else 5)
        if kind == 5:
            return [self._value(depth + 1) for _ in range(self._rng.randint(0, 2))]
        if kind == 6:
            return self._object(depth + 1)
        return (self.words(2), self._rng.randint(-(2**70), 2**70), self._rng.choice((0.5, 1e30, -0.0)), None, True)[
            kind
        ]
