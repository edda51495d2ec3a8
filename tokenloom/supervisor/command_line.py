"""Shows another command line for this process, as ``ps`` reads it."""

import ctypes
import os
from collections.abc import Sequence

_PR_SET_NAME = 15
_FIRST_FIELD = 3
_ARG_START, _ARG_END, _ENV_START, _ENV_END = (number - _FIRST_FIELD for number in range(48, 52))
"""Places of fields of /proc/self/stat behind the name; proc(5) counts from one."""


def show_command_line(words: Sequence[str]) -> None:
    """Write a command over the one that started this process, cut to the room of that one and its environment.

    The C library's strings of the environment must not be in use: assign ``os.environ`` anew before. Linux only.
    """
    start, size = _room()
    text = " ".join(words).encode(errors="replace")[: max(size - 1, 0)]
    if size:
        ctypes.memset(start, 0, size)
        ctypes.memmove(start, text, len(text))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(os.path.basename(words[0])), 0, 0, 0)


def _room() -> tuple[int, int]:
    """Return the address and size of the memory that the kernel reads the command line from; zero: unknown."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[i]) for i in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
    if not 0 < arg_start < arg_end:
        return 0, 0
    return arg_start, (env_end if env_start == arg_end else arg_end) - arg_start
