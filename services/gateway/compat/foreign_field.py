"""Defines the rows of the lists of request fields."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FieldEffect(Enum):
    """What the gateway does with a field."""

    WORKS = "works"
    REFUSED = "refused"
    """The request fails with status 400 and an error that names the field."""
    IGNORED = "ignored"
    """The request succeeds, and its response names the field in ``x-tokenloom-ignored``."""


@dataclass(frozen=True, slots=True)
class ForeignField:
    """Describes one request field.

    Attributes:
        name: The field; for a member of a field, the path to it, in which ``[]`` stands for any item.
        sample: A value of the whole field, which has an effect where the field works.
        outcome: What the gateway does with the sample.
        note: Why the field is refused or ignored, or what to send instead; empty for one that works.
        needs: Other fields of the body that the sample needs.
    """

    name: str
    sample: Any
    outcome: FieldEffect
    note: str
    needs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def field(self) -> str:
        """The field of the body that it is, or that it is a member of."""
        return re.split(r"[.\[]", self.name)[0]


@dataclass(frozen=True, slots=True)
class ForeignApi:
    """Lists the request fields of one API.

    Attributes:
        name: Server and endpoint.
        path: The route of this gateway.
        base: The smallest body that the route answers.
        fields: The rows.
    """

    name: str
    path: str
    base: Mapping[str, Any]
    fields: Sequence[ForeignField]


def works(name: str, sample: Any, **needs: Any) -> ForeignField:
    return ForeignField(name, sample, FieldEffect.WORKS, "", needs)


def refused(name: str, sample: Any, note: str, **needs: Any) -> ForeignField:
    return ForeignField(name, sample, FieldEffect.REFUSED, note, needs)


def ignored(name: str, sample: Any, note: str, **needs: Any) -> ForeignField:
    return ForeignField(name, sample, FieldEffect.IGNORED, note, needs)
