"""``python -m tests.gpu_check SECTION FOLDER``: runs one section; ``start`` runs them all."""

import importlib
import sys
from pathlib import Path

from .rows import Rows


def main() -> None:
    name, folder = sys.argv[1:]
    importlib.import_module(f"tests.gpu_check.{name}").run(Rows(name, Path(folder)))


if __name__ == "__main__":
    main()
