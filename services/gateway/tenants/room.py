"""Divides one limit of a gateway among its tenants."""


class Room:
    """Counts the places that are taken, and keeps some free for tenants that hold few.

    A tenant may hold at most as many places as are free: alone at most half of all, two that want everything a third
    each, N of them 1/(N+1) each, and as many remain for a tenant that comes later. The rule needs neither the number
    of tenants nor a reservation for each of them. A gateway with one tenant does not divide: all places are its own.
    """

    def __init__(self, size: int, *, is_divided: bool) -> None:
        self.size = size
        self.taken = 0
        self._is_divided = is_divided

    def take(self, held: int, wanted: int) -> bool:
        """Take places for a tenant that holds ``held``; return False, and take none, if it may not have them.

        An empty room admits any number: a request that exceeds the whole limit runs alone.
        """
        if self.taken:
            free = self.size - self.taken
            if wanted > free or (self._is_divided and held + wanted > free):
                return False
        self.taken += wanted
        return True

    def give_back(self, returned: int) -> None:
        """Free places."""
        self.taken -= returned
