"""``python -m tools.stubs [go] [npm]``: write the stubs, of both by default, and print where they are."""

import argparse
import os
import sys

from . import go_stubs, npm_stubs
from .protoc import StubsFailed

_WRITERS = {"go": go_stubs.write, "npm": npm_stubs.write}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("languages", nargs="*", default=[*_WRITERS], help="go, npm; default: both")
    chosen = parser.parse_args().languages
    if unknown := [name for name in chosen if name not in _WRITERS]:
        parser.error(f"no stubs for {', '.join(unknown)}; there are those for {', '.join(_WRITERS)}")
    try:
        for name in chosen:
            sys.stdout.write(f"{name}: {os.path.relpath(_WRITERS[name]())}\n")
    except StubsFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
