"""Which pages of other origins a browser may let talk to the gateway."""

from collections.abc import Collection

from .exchange import Exchange, Headers

_ANY = "*"
_MAX_AGE_SECONDS = 600


class Cors:
    """The origins that an operator names; ``*``: all."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = _ANY in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def allow(self, exchange: Exchange) -> None:
        """Puts what a browser wants to see into the answer to a page of such an origin."""
        origin = exchange.headers.get(b"origin")
        if origin is not None and (self._any or origin in self._origins):
            exchange.extra_headers = (
                (b"access-control-allow-origin", b"*" if self._any else origin),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
                (b"vary", b"origin"),
            )

    def is_preflight(self, exchange: Exchange) -> bool:
        """Whether a browser asks what it may send."""
        return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers

    async def answer(self, exchange: Exchange) -> None:
        """To a preflight; of another origin it tells nothing, and the browser gives up."""
        await exchange.respond(200, b"", b"text/plain", self._preflight(exchange))

    def _preflight(self, exchange: Exchange) -> Headers:
        if exchange.extra_headers:
            yield b"access-control-allow-methods", b"GET, HEAD, POST"
            yield b"access-control-allow-headers", b"authorization, content-type, x-request-id, *"
            yield b"access-control-max-age", str(_MAX_AGE_SECONDS).encode()
