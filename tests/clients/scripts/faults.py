"""What goes wrong for clients, and whether each recognises it: ``recognised`` counts, and fails where one is not."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LIMITED, AWAY, SILENT = "Answer that I ask too often.", "Answer that nothing serves.", "Never answer."
"""Turns of a user that the scripted model answers with status 429, with 503, and not at all."""


@dataclass(frozen=True)
class Fault:
    """A request that fails."""

    name: str
    text: str = "Hello."
    model: str = ""
    temperature: float = 0.0
    timeout: float = 60.0
    """Seconds that the client waits."""
    is_scripted: bool = False

    @property
    def url(self) -> str:
        """The gateway's URL, without a path."""
        return os.environ["SCRIPTED_URL" if self.is_scripted else "TOKENLOOM_URL"]

    @property
    def model_name(self) -> str:
        return self.model or os.environ["SCRIPTED_MODEL" if self.is_scripted else "TOKENLOOM_MODEL"]


TOO_LONG = Fault("context too long", text="word " * 4000)
UNKNOWN_MODEL = Fault("unknown model", model="none-such")
BAD_FIELD = Fault("bad field", temperature=-1.0)
RATE_LIMIT = Fault("rate limit", text=LIMITED, is_scripted=True)
NOT_SERVED = Fault("503", text=AWAY, is_scripted=True)
TIMEOUT = Fault("timeout", text=SILENT, timeout=1.0, is_scripted=True)
FAULTS = (TOO_LONG, UNKNOWN_MODEL, BAD_FIELD, RATE_LIMIT, NOT_SERVED, TIMEOUT)

Expected = type[BaseException] | Callable[[BaseException], bool]


def recognised(ask: Callable[[Fault], object], expected: Mapping[Fault, Expected]) -> str:
    """Return how many faults were recognised, which are all. ``ask`` makes the request and lets its error out.

    An expected value is the error's class, or a function of the error that is true where the client knows the cause.
    """
    for fault, kind in expected.items():
        try:
            answer = ask(fault)
        except Exception as error:  # each client has a tree of errors of its own
            is_known = isinstance(error, kind) if isinstance(kind, type) else kind(error)
            assert is_known, f"{fault.name}: {type(error).__mro__}: {error}"
        else:
            raise AssertionError(f"{fault.name}: no error, but {str(answer)[:200]!r}")
    return f"{len(expected)} of {len(FAULTS)} kinds of errors" if len(expected) < len(FAULTS) else "all kinds of errors"
