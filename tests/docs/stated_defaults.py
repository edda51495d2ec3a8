"""Finds the defaults that pages state for options, and compares them with the generated configuration page."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .markdown_page import DOCS

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "%": 1e-2, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_FLAG = r"`(--[a-z][a-z-]+)`"
_VALUE = r"(\d[\d,.]*\d|\d)(?: ?(ms|s|%|KiB|MiB|GiB))?(?![\w-])"
_FORMS = (
    re.compile(rf"{_FLAG}\s\({_VALUE}"),  # `--max-queue-seconds` (10 s)
    re.compile(rf"{_FLAG}, {_VALUE}\)"),  # (`--frame-interval`, 8 ms)
)
_BEFORE = re.compile(rf"{_VALUE}\s\({_FLAG}\)")  # 60 s (`--keep-lost-requests`)
_NAMED = re.compile(r"`(--[a-z][a-z-]+) ([\w.-]+)`, (?:which is )?the default")
_SWITCH = re.compile(rf"{_FLAG}(?: is|,) (on|off) by default")


@dataclass(frozen=True)
class Stated:
    """One default that a page states, as text and, if it is one, as a number in the option's unit."""

    flag: str
    text: str
    number: float | None = None

    def is_so(self, defaults: Mapping[str, set[str]]) -> bool:
        """Say whether an option of this name has the default. Some services share a name."""
        known = defaults.get(self.flag, set())
        if self.number is None:
            return self.text in known or (self.text == "false" and "" in known)
        return any(_is_number(each) and abs(float(each) - self.number) < 1e-9 for each in known)


def defaults_of_the_code() -> dict[str, set[str]]:
    """Return the defaults of each flag by the configuration page, which a test compares with the code."""
    found: dict[str, set[str]] = {}
    for line in (DOCS / "reference" / "configuration.md").read_text().splitlines():
        if line.startswith("| `--"):
            flags, _, default = (cell.strip() for cell in line.split("|")[1:4])
            for flag in re.findall(_FLAG, flags):
                found.setdefault(flag, set()).add(default.strip("`"))
    return found


def stated_defaults(text: str) -> Iterator[Stated]:
    """Yield the defaults that a page states in sentences, and in tables with a column ``default``."""
    for form in _FORMS:
        yield from (_number(flag, *value) for flag, *value in form.findall(text))
    yield from (_number(flag, *value) for *value, flag in _BEFORE.findall(text))
    yield from (Stated(flag, value) for flag, value in _NAMED.findall(text))
    yield from (Stated(flag, "true" if word == "on" else "false") for flag, word in _SWITCH.findall(text))
    yield from _in_tables(text)


def _in_tables(text: str) -> Iterator[Stated]:
    column: int | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            column = None
        elif column is None:
            column = next((place for place, cell in enumerate(cells) if cell == "default"), -1)
        elif 0 <= column < len(cells):
            flags = [flag for cell in cells[:column] for flag in re.findall(_FLAG, cell)]
            if len(flags) == 1 and (value := re.fullmatch(_VALUE, cells[column].strip("`"))):
                yield _number(flags[0], *value.groups())


def _number(flag: str, digits: str, unit: str | None) -> Stated:
    return Stated(flag, f"{digits} {unit or ''}".strip(), float(digits.replace(",", "")) * _UNITS[unit or ""])


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None
