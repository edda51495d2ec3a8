"""The JSON file in which a service publishes its name, process and addresses."""

import contextlib
import json
import os
from pathlib import Path

from tokenloom.request.errors import Unavailable


class StateFile:
    """Keeps the published fields, and writes them to the file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fields: dict[str, object] = {}

    def publish(self, **fields: object) -> None:
        """Add fields and replace the file. Raises ``Unavailable`` when it cannot be written."""
        self._fields |= fields
        if self._path is None:
            return
        # Replaced as a whole: the supervisor and `tokenloom ps` read the file at any moment and must not see half of
        # it.
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(self._fields))
            draft.replace(self._path)
        except OSError as error:
            raise Unavailable(f"state_file: cannot write {self._path}: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the file, unless a successor has written its own; nothing is written any more. Idempotent."""
        if (path := self._path) is None:
            return
        self._path = None
        with contextlib.suppress(OSError, ValueError):
            # With `--drain finish` the successor of a gateway starts while this process still drains, and writes the
            # same file.
            if json.loads(path.read_text()).get("pid") == self._fields.get("pid"):
                path.unlink(missing_ok=True)
