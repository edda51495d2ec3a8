"""Imports at the start of a process without walks of the garbage collector.

The command line imports it for the help of a command, which must not wait for asyncio.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import within this context at the start of a process. The collector ignores the objects that exist at its end.

    Use it in our own processes only: in a user's program, objects that exist now may become garbage.
    """
    if not gc.isenabled():
        yield
        return
    # Collections walk what modules define again and again while it is imported: for torch alone 0.1 to 0.35 s of CPU.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
