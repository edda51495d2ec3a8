"""Counts what a tenant's files take of its limits."""

from typing import Self

from tokenloom.request.limits import AdmissionLimit, Reservation


class Shelf:
    """Limits the files of one tenant: those that are stored, those that arrive, and the results that batches collect.

    Attributes:
        places: Number of files.
        bytes: Of all of them.
    """

    def __init__(self, max_files: int, max_bytes: int) -> None:
        self.places = AdmissionLimit(max_files)
        self.bytes = AdmissionLimit(max_bytes)

    def take(self, num_files: int) -> "FileRoom | None":
        """Return room for files that have no bytes yet; None if the tenant may not have so many more."""
        places = self.places.take(num_files)
        return None if places is None else FileRoom(self, places, self.bytes.empty())

    def take_anyway(self, num_files: int, num_bytes: int) -> "FileRoom":
        """Return room for files that are there already, whatever the limits are now."""
        return FileRoom(self, self.places.take_anyway(num_files), self.bytes.take_anyway(num_bytes))


class FileRoom:
    """Holds places and bytes of a shelf from before a file is written until it is deleted, and gives them back once."""

    def __init__(self, shelf: Shelf, places: Reservation, num_bytes: Reservation) -> None:
        self._shelf = shelf
        self._places = places
        self._bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """How many bytes it holds."""
        return self._bytes.amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, added: int) -> bool:
        """Take more bytes; return False, and take none, if the tenant may not have them."""
        taken = self._shelf.bytes.take(added)
        if taken is not None:
            self._bytes.absorb(taken)
        return taken is not None

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes, which are on disk already, whatever the limit is."""
        if (missing := num_bytes - self._bytes.amount) > 0:
            self._bytes.absorb(self._shelf.bytes.take_anyway(missing))
        else:
            self._bytes.release(-missing)

    def move(self) -> "FileRoom":
        """Return a room that holds all that this one holds; this one is empty afterwards."""
        return FileRoom(self._shelf, self._places.move(), self._bytes.move())

    def split(self, num_bytes: int) -> "FileRoom":
        """Move the place and the bytes of one file to a room of its own. What is missing here is taken anyway: the file
        is there."""
        room = self._shelf.take_anyway(max(1 - self._places.amount, 0), max(num_bytes - self._bytes.amount, 0))
        room._places.absorb(self._places.split(min(1, self._places.amount)))
        room._bytes.absorb(self._bytes.split(min(num_bytes, self._bytes.amount)))
        return room

    def release(self) -> None:
        """Give back all that is left. Idempotent."""
        self._places.release()
        self._bytes.release()
