"""``python -m tests.matrix``: try every pair of features on a mesh of its own, and write the page.

A run that was interrupted goes on where it ended: remove cells from the file, or name pairs, to try them again.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .cells import RESULTS, Matrix, missing, pairs, read, write
from .features import FEATURES
from .page import PAGE, page


def main() -> int:
    """Return 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the cells [%(default)s]")
    parser.add_argument("--only", nargs="+", default=[], metavar="FEATURE", help="try cells of these again")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no cell after so long [90]")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    if unknown := set(options.only) - set(FEATURES):
        parser.error(f"unknown features: {', '.join(sorted(unknown))}; known are {', '.join(FEATURES)}")
    cells = {(cell.first, cell.second): cell for cell in read(options.results) if (cell.first, cell.second) in pairs()}
    if options.only:
        again = set(options.only)
        wanted = [pair for pair in pairs() if (again <= set(pair) if len(again) == 2 else again & set(pair))]
    else:
        wanted = list(missing(list(cells.values())))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        matrix = Matrix(Path(directory))
        for pair in [] if options.page else wanted:
            if time.monotonic() - begin > options.minutes * 60:
                print("the time is over; run the command again to go on")
                break
            cells[pair] = cell = matrix.cell(*pair)
            print(f"{cell.first} + {cell.second}: {cell.verdict} {cell.reason[:200]}", flush=True)
            write(list(cells.values()), options.results)
    if options.results == RESULTS:
        PAGE.write_text(page(read()))
    return int(any(cell.verdict == "wrong" for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
