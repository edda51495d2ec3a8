"""The standard streams of the command: one may be closed, its reader may go away, and its disk may be full."""

import io
import os
import sys

from .failures import CommandFailed


def prepare() -> None:
    """Open those that were closed at the start (``2>&-``), so that no socket or log gets their numbers; and let the
    output write what its encoding has no character for, such as the bytes of a file's name, with an escape."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def report(text: str) -> None:
    """Write a line to standard error, if that can be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def flush_all() -> bool:
    """Write what standard output and error hold back. Returns False, and says so, if the output cannot be written.

    What cannot be written is dropped: the interpreter would try it again and change the exit status.
    """
    whole = True
    try:
        sys.stdout.flush()
    except OSError as error:
        whole = False
        _drop(1)
        if not isinstance(error, BrokenPipeError):  # as after `| head`
            report(f"Error: standard output cannot be written: {error.strerror}")
    try:
        sys.stderr.flush()
    except OSError:
        _drop(2)
    return whole


def _drop(number: int) -> None:
    """Let a standard stream lead nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def piped() -> str | None:
    """Return the piped input without the last line break; None if standard input is a terminal or empty.

    Raises `CommandFailed` for bytes that are no text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read().rstrip("\n") or None
    except UnicodeDecodeError:
        raise CommandFailed(f"standard input is not text in {sys.stdin.encoding}") from None


def with_piped(prompt: str | None) -> str | None:
    """Return the argument followed by the piped input; None if both are missing."""
    return "\n".join(filter(None, (prompt, piped()))) or None
