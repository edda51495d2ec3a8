"""Answers flags of ``vllm serve`` that Tokenloom does not have: what to use instead, or what holds without it.

A flag that both have under one name (``--max-num-seqs``) is an option of ours and stands in no table here.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from .options import did_you_mean
from .vllm_flags import ANSWERS

_OWN = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_COMMAND = re.compile(r"`[^`]*`")
"""A command in an answer, whose flags are not options of ``tokenloom serve``."""


@dataclass(frozen=True)
class ForeignFlag:
    """Describes one flag of ``vllm serve``."""

    names: tuple[str, ...]
    """The flag as users write it, then its short forms: ``("--tensor-parallel-size", "-tp")``."""
    answer: str
    """A clause that names what to use or the reason; it continues a sentence."""

    @property
    def own(self) -> tuple[str, ...]:
        """The options of ``tokenloom serve`` that the answer names, without ``--no-``."""
        named = _OWN.findall(_COMMAND.sub("", self.answer))
        return tuple(dict.fromkeys(name.replace("--no-", "--") for name in named))

    def sentence(self, name: str, offered: Collection[str]) -> str:
        """Return the answer to a user who wrote ``name`` for a command that offers these flags."""
        of_serve = "" if set(self.own) <= set(offered) else ", with `tokenloom serve`"
        return f"{name} is a flag of vLLM: {self.answer}{of_serve}"


@cache
def foreign_flags() -> tuple[ForeignFlag, ...]:
    """Return the flags of vLLM that are answered, in the order of the table."""
    return tuple(ForeignFlag(tuple(names.split()), answer) for names, answer in ANSWERS.items())


def answer_unknown(written: str, own: Collection[str]) -> str:
    """Return one sentence about a flag that a command does not have.

    Args:
        written: The argument as the user wrote it, perhaps with ``=value``.
        own: The flags of the command.
    """
    name = written.partition("=")[0]
    known = _by_name()
    for spelling in (name, name.replace("_", "-"), "--" + name.removeprefix("--no-").replace("_", "-")):
        if spelling in known:
            return known[spelling].sentence(name, own)
    return f"{name}: no such option{did_you_mean(name, own)}"


@cache
def _by_name() -> dict[str, ForeignFlag]:
    return {name: each for each in foreign_flags() for name in each.names}
