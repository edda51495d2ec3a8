"""The parameters behind a path's question mark."""

from collections.abc import Collection, Mapping
from urllib.parse import parse_qs

from tokenloom.request.errors import InvalidArgument

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Query:
    """Read by name and type; every reader raises ``InvalidArgument`` naming the parameter."""

    def __init__(self, raw: bytes, known: Collection[str]) -> None:
        try:
            self._values: Mapping[str, list[str]] = parse_qs(raw.decode("ascii"), keep_blank_values=True)
        except ValueError:
            raise InvalidArgument("the query is not valid") from None
        for name in self._values:
            if name not in known:
                raise InvalidArgument(f"{name[:64]}: no such parameter", name[:64])

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        value = self._last(name, default)
        if value not in choices:
            raise InvalidArgument(f"{name} must be one of {', '.join(choices)}", name)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = _BOOLEANS.get(self._last(name, str(default)).lower())
        if value is None:
            raise InvalidArgument(f"{name} must be true or false", name)
        return value

    def choices(self, name: str, choices: Collection[str]) -> list[str]:
        """A parameter that may be repeated."""
        values = self._values.get(name, [])
        if any(value not in choices for value in values):
            raise InvalidArgument(f"{name} may be {', '.join(choices)}", name)
        return values

    def _last(self, name: str, default: str) -> str:
        return self._values.get(name, [default])[-1]
