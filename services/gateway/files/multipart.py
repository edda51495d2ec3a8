"""Reads an upload's body, ``multipart/form-data``, piece by piece: the file goes to disk, the fields are kept."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tokenloom.request.errors import InvalidArgument

from ..http.http_exchange import UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 32
"""Limits the parts of a body: OpenAI's uploads have four, and its transcriptions up to a dozen."""
MAX_HEAD_BYTES = 8 << 10
"""Limits the headers of each part."""
MAX_FIELD_BYTES = 4 << 10
"""Limits the value of each part but the file."""
_LIST = "[]"
MAX_BOUNDARY = 70
"""Limits the boundary, as RFC 2046 does."""


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary of the parts. Raises ``UnsupportedMediaType`` and ``InvalidArgument``."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise UnsupportedMediaType("the body must be a form; set the header Content-Type: multipart/form-data")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise InvalidArgument(f"Content-Type must have a boundary of 1 to {MAX_BOUNDARY} characters", "Content-Type")
    return boundary


class Upload:
    """Reads the parts of one body. To be called in one thread at a time; it writes to disk.

    Attributes:
        fields: The values of the parts that are no file, by name.
        lists: Those whose names end with brackets, as names of lists do, without the brackets.
        file_name: The client's name for the file; None: no file has arrived.
        size: Bytes of the file so far.
    """

    def __init__(self, boundary: bytes, write: Callable[[bytes], object]) -> None:
        """``write``: takes the file's bytes."""
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.file_name: str | None = None
        self.size = 0
        self._write = write
        self._num_parts = 0
        self._is_whole = False
        self._in_file = False
        self._head: dict[str, bytes] = {}
        self._name = b""
        self._value = b""
        self._part = ""
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_head,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_end": self._finish,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, piece: bytes) -> None:
        """Read a piece of the body. Raises ``InvalidArgument`` and ``OSError``."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidArgument(f"the body is not valid multipart/form-data: {error}") from None

    def close(self) -> None:
        """Check that the form is whole. Raises ``InvalidArgument`` if the body has ended early or has no file."""
        if not self._is_whole:
            raise InvalidArgument("the body ends before the last boundary")
        if self.file_name is None:
            raise InvalidArgument("the form has no file", "file")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidArgument(f"the form has more than {MAX_PARTS} parts")
        self._head, self._name, self._value = {}, b"", b""
        self._in_file = False

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_head()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_head()

    def _check_head(self) -> None:
        size = len(self._name) + len(self._value) + sum(len(name) + len(value) for name, value in self._head.items())
        if size > MAX_HEAD_BYTES or len(self._head) > MAX_PARTS:
            raise InvalidArgument(f"the headers of a part have more than {MAX_HEAD_BYTES} bytes")

    def _end_header(self) -> None:
        self._head[self._name.decode("latin-1").lower()] = self._value
        self._name = self._value = b""

    def _end_head(self) -> None:
        kind, options = parse_options_header(self._head.get("content-disposition", b""))
        name = _text(options.get(b"name", b""))
        if kind != b"form-data" or not name:
            raise InvalidArgument("each part must have Content-Disposition: form-data with a name")
        self._part = name
        if name != "file":
            if name.endswith(_LIST):
                return
            if name in self.fields:
                raise InvalidArgument(f"the field {name[:64]!r} is given twice", name[:64])
            self.fields[name] = ""
            return
        if self.file_name is not None:
            raise InvalidArgument("the form has two files", "file")
        self._in_file = True
        self.file_name = _text(options.get(b"filename", b""))

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.size += end - start
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidArgument(f"the field {self._part[:64]!r} has more than {MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._part.endswith(_LIST):
            self.lists.setdefault(self._part.removesuffix(_LIST), []).append(_text(self._value))
        elif not self._in_file:
            self.fields[self._part] = _text(self._value)

    def _finish(self) -> None:
        self._is_whole = True


def _text(value: Any) -> str:
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the form holds text that is not UTF-8") from None
