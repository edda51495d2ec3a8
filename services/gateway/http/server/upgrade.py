"""Reads on after the head of a request that asks for another protocol, as if it had not asked."""

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class IgnoredUpgrade:
    """Passes a parser's calls on to the protocol, but for those of the first head, which another parser has read.

    httptools ends its work behind the head of a request with ``Upgrade``, whatever its framing: the body that Java's
    client and ``curl --http2`` send with ``Upgrade: h2c`` was dropped. RFC 9110 lets a server ignore the header.
    """

    def __init__(self, protocol: object) -> None:
        self._protocol = protocol
        self._is_muted = True

    def __getattr__(self, name: str) -> object:
        """Return the protocol's method; httptools asks for each once."""
        method = getattr(self._protocol, name)
        if name in ("on_message_begin", "on_url", "on_header"):
            return lambda *arguments: None if self._is_muted else method(*arguments)
        return method

    def on_headers_complete(self) -> None:
        if self._is_muted:
            self._is_muted = False
        else:
            self._protocol.on_headers_complete()  # type: ignore[attr-defined]


def parser_behind(protocol: object, headers: list[tuple[bytes, bytes]]) -> httptools.HttpRequestParser:
    """Return a parser that expects the body of a request with these headers, and then further requests."""
    parser = httptools.HttpRequestParser(IgnoredUpgrade(protocol))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    framing = [b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING]
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
    return parser
