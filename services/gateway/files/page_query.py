"""Reads which part of a list a client asks for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from tokenloom.request.errors import InvalidArgument

MAX_ITEMS = 10_000
_ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Describes a part of a list.

    Attributes:
        after: Id of the object before the first one; empty: the list's beginning.
        limit: How many objects to return.
        order: ``desc``: the newest first.
        purpose: Return only files of this purpose; empty: all.
    """

    after: str
    limit: int
    order: str
    purpose: str

    @classmethod
    def read(cls, raw: bytes, *, most: int, default: int, names: Collection[str]) -> "PageQuery":
        """Read a query string. Raises ``InvalidArgument`` naming the parameter.

        ``most``: limits ``limit``. ``names``: the parameters that the list has.
        """
        try:
            values = {name: given[-1] for name, given in parse_qs(raw.decode("ascii"), max_num_fields=16).items()}
        except ValueError:
            raise InvalidArgument("the query string is not valid") from None
        for name in values:
            if name not in names:
                raise InvalidArgument(f"{name[:64]}: no such parameter", name[:64])
        digits = values.get("limit", str(default))
        if not (digits.isascii() and digits.isdigit() and len(digits) < 8 and 1 <= int(digits) <= most):
            raise InvalidArgument(f"limit must be an integer from 1 to {most}", "limit")
        order = values.get("order", "desc")
        if order not in _ORDERS:
            raise InvalidArgument(f"order must be one of {', '.join(_ORDERS)}", "order")
        return cls(values.get("after", ""), int(digits), order, values.get("purpose", ""))

    def page(self, objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's list. ``objects``: all of them, the oldest first. Raises ``InvalidArgument`` for an ``after``
        that is not among them."""
        ordered = list(objects) if self.order == "asc" else list(reversed(objects))
        if self.after:
            ids = [each["id"] for each in ordered]
            if self.after not in ids:
                raise InvalidArgument("after must be the id of an object of the list", "after")
            ordered = ordered[ids.index(self.after) + 1 :]
        data = ordered[: self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(ordered) > len(data),
        }
