"""Writes every picture into ``docs/pictures``."""

import sys
from pathlib import Path

from .gallery import PICTURES

_FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
