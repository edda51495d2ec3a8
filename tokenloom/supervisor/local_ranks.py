"""The ranks of a data-parallel group that one mesh runs."""

from dataclasses import dataclass
from pathlib import Path

from tokenloom.services.runtime.addresses import Address


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """Says which ranks of a group run here.

    Attributes:
        size: Ranks of the group; None: there is no group.
        local: Ranks on this machine; None: all.
        start: The number of the first one.
        is_split: Whether other meshes run the other ranks, and something in front balances.
        address: Where rank 0 of a mixture-of-experts model listens; empty: at a socket of this machine.
    """

    size: int | None
    local: int | None
    start: int
    is_split: bool
    address: str = ""

    @property
    def count(self) -> int:
        """Ranks on this machine; 0 without a group."""
        return self.local or self.size or 0

    def check(self) -> None:
        """Raise ``ValueError``, naming the options, if they do not fit together."""
        if self.size is None:
            if self.is_split or self.local is not None or self.start or self.address:
                raise ValueError("the options --data-parallel-… need --data-parallel-size")
        elif self.start + self.count > self.size:
            raise ValueError(
                f"--data-parallel-start-rank {self.start} and {self.count} engines here exceed "
                f"--data-parallel-size {self.size}"
            )
        elif self.count != self.size and not self.is_split:
            raise ValueError(
                f"--data-parallel-size-local {self.count} is less than --data-parallel-size {self.size}: add "
                "--data-parallel-hybrid-lb to balance in front of the machines, or start the engines of other machines "
                "as services of this mesh (docs/operate/scaling.md)"
            )

    def flags(self, place: int, socket: Path) -> tuple[str, ...]:
        """Return the flags of an engine. ``place``: its number on this machine. ``socket``: where rank 0 listens if all
        ranks are here and no address says otherwise."""
        if self.size is None:
            return ()
        flags = (
            *("--data-parallel-group", "data-parallel", "--data-parallel-size", str(self.size)),
            *("--data-parallel-rank", str(self.start + place)),
        )
        address = self.address or ("" if self.is_split else str(Address(path=str(socket))))
        return (*flags, "--data-parallel-address", address) if address else flags
