"""``python -m tests.gpu_check SECTION FOLDER``: runs one section; ``start`` runs them all."""

import importlib
import sys
from pathlib import Path

from .rows import Rows


def main() -> None:
    # A machine with a GPU is lent for minutes, so a mistake of a section must show before: the tests run each on the
    # CPU. Only what needs a driver, such as graphs and events, is left to the machine.
    name, folder = sys.argv[1:]
    importlib.import_module(f"tests.gpu_check.{name}").run(Rows(name, Path(folder)))


if __name__ == "__main__":
    main()
