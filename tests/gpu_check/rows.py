"""Prints and keeps the rows of a section as they come."""

import json
from pathlib import Path

from tests.gpu_check.start import lines_of, shown


class Rows:
    """Holds where the rows of one section go."""

    def __init__(self, section: str, results: Path) -> None:
        self._section = section
        self.folder = results
        self.file = results / "rows.jsonl"

    def add(self, name: str, **values: float | str) -> None:
        """Print a row and append it to the file, so that a section that is stopped keeps what it found."""
        print(f"{name:<44} {shown(values)}", flush=True)
        with self.file.open("a") as file:
            file.write(json.dumps({"section": self._section, "name": name, **values}) + "\n")

    def skip(self, name: str, reason: str) -> None:
        """Add a row of what was not run, which the table and the last line show as that."""
        self.add(name, not_run=reason)

    def find(self, name: str, column: str) -> float:
        """Return what an earlier section measured; 0: it did not."""
        return next((float(row[column]) for row in reversed(lines_of(self.file)) if row["name"] == name), 0.0)
