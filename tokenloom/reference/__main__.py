"""Writes all pages that derive from the code: ``python -m tokenloom.reference docs``."""

import sys
from pathlib import Path

from .pages import PAGES, grpc_pages


def main(folder: Path) -> None:
    """Write all pages below ``folder``."""
    for name, text in {**{name: write() for name, write in PAGES.items()}, **grpc_pages()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
