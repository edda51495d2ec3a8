"""Says how a request can fail."""


class RequestFailed(Exception):
    """Raised when a request ends without its whole answer.

    Attributes:
        kind: Short name by which failures are counted: the typed error's name, ``refused``, ``cut`` or ``hung``.
        is_typed: Whether the server said what was wrong.
    """

    def __init__(self, kind: str, detail: str, *, is_typed: bool) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.is_typed = is_typed


ABORTED = "aborted"
"""Code of the error of a call whose answer continues in another one."""


def typed(kind: str, detail: str) -> RequestFailed:
    return RequestFailed(kind, detail, is_typed=True)


def refused(detail: str) -> RequestFailed:
    """A connection was refused."""
    return RequestFailed("refused", detail, is_typed=False)


def cut(detail: str) -> RequestFailed:
    """A response ended without an error."""
    return RequestFailed("cut", detail, is_typed=False)


def hung(detail: str) -> RequestFailed:
    """The client's own time limit passed."""
    return RequestFailed("hung", detail, is_typed=False)
