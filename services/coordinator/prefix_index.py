"""Which prefixes an engine probably has in its KV cache: those of its recent picks. For placement only. No I/O."""

from collections import OrderedDict
from collections.abc import Sequence

MAX_HASHES = 256
"""Of one prompt; more do not change a placement."""
MAX_BLOCKS = 1 << 16
"""Of one engine: its least recently picked go first, as in its own cache."""


class PrefixIndex:
    """Hashes of blocks, least recently used first. Hashes are chained: a block's stands for all of its prefix."""

    def __init__(self, num_kv_blocks: int) -> None:
        """``num_kv_blocks``: of the engine, which remembers no more than it has."""
        self._max_blocks = min(num_kv_blocks, MAX_BLOCKS)
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks of a prompt are here, from its beginning."""
        count = 0
        for block_hash in hashes[:MAX_HASHES]:
            if block_hash not in self._hashes:
                break
            count += 1
        return count

    def add(self, hashes: Sequence[int]) -> None:
        """A prompt was placed. Its last block is the first to be forgotten, as without the others it is of no use."""
        for block_hash in reversed(hashes[:MAX_HASHES]):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)
