"""One method of one path: how it is found, who may call it, and what the OpenAPI document says of it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .http_exchange import HttpExchange

_PARAMETER = re.compile(r"\{[^{}]*\}")
_MODEL_PATH = "/v1/models/"


@dataclass(frozen=True, eq=False)
class Route:
    """Describes a route. The handlers of a gateway are bound to the routes that it serves, as keys."""

    method: str
    """In capital letters; a GET answers HEAD too."""
    path: str
    """It may hold parameters in braces, as its third and fifth parts, which stand for ids of objects."""
    summary: str = ""
    """What it does; empty: the OpenAPI document leaves it out, as it does not belong to the API."""
    answer: type[msgspec.Struct] | None = None
    """None: plain text."""
    body: type[msgspec.Struct] | None = None
    is_form: bool = False
    """Whether the body is a form instead of JSON."""
    media_type: str = "text/plain"
    """Of an answer that is not JSON."""
    streams: bool = False
    """Whether it may answer with server-sent events."""
    streams_lines: bool = False
    """Whether it may answer with lines of JSON, each like a whole answer."""
    answers_list: bool = False
    """Whether the answer is a list of the type."""
    may_be_away: bool = False
    """Whether a 503 response has the same body."""
    is_open: bool = False
    """Whether it needs no key, for load balancers and browsers, which have none."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Query parameters and their schemas."""
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Request headers and their schemas."""
    error: type[msgspec.Struct] | None = None
    """The form of its errors; None: OpenAI's."""
    is_admin: bool = False
    """Whether it needs an admin key; gateways without one do not have the route."""
    is_pure: bool = False
    """Whether a request that is answered twice has the effects of one. A GET has none in any case, and any gateway
    answers it but for those of batches."""
    is_of_batches: bool = False
    """Whether it needs a directory for batches; gateways without one say so."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return [name.strip("{}") for name in _PARAMETER.findall(self.path)]

    @property
    def pattern(self) -> str:
        """The path with ``*`` for each parameter, as metrics and logs name it."""
        return _PARAMETER.sub("*", self.path)


def pattern_of(path: str) -> str:
    """Return the path of a request with ``*`` in place of its third and fifth parts, under which its route is found if
    it is not under the path itself; the name of a model may contain slashes."""
    if path.startswith(_MODEL_PATH):
        return _MODEL_PATH + "*"
    return "/".join("*" if at in (3, 5) else part for at, part in enumerate(path.split("/", 6)))


Handler = Callable[[HttpExchange], Awaitable[None]]
Routes = Mapping[Route, Handler]
