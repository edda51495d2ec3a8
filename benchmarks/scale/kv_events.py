"""Measures what it costs the coordinator to follow the prefix caches of a thousand engines.

``python -m tokenloom.bench.scale.kv_events`` applies the changes that engines send in a second to the real index: each
engine computes prompts that share no prefix and were placed there before, its cache is full, and so it evicts as many
blocks as it stores. It prints
the processor time of one message without gRPC, and the share of a core of all engines' messages.
"""

import argparse
import random
import time
from collections import deque

from tokenloom.services.coordinator.caches.cache_followers import INTERVALS
from tokenloom.services.coordinator.caches.engine_cache import EngineCache
from tokenloom.services.coordinator.engines.defaults import PREFIX_INDEX_MIB
from tokenloom.services.coordinator.prefixes.prefix_index import PrefixIndex
from tokenloom.services.coordinator.report_interval import report_interval
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import PrefixChain, PrefixChanges, WatchKVEventsResponse

BLOCK_SIZE, PROMPT_BLOCKS = 16, 64


class Cache:
    """Makes the messages of one engine, and gives them to the index as the coordinator does."""

    def __init__(self, index: PrefixIndex, row: int, held: int) -> None:
        identity = EngineIdentity(engine_id=f"engine-{row}", epoch=1, num_kv_blocks=1 << 16)
        index.open(row, identity.num_kv_blocks)
        self._index, self._row = index, row
        self._follower = EngineCache(index, identity, row)
        self._held: deque[list[int]] = deque()
        self._sequence = 0
        while len(self._held) * PROMPT_BLOCKS < held:
            self.take(self.message(PROMPT_BLOCKS, evicts=False))

    def message(self, num_blocks: int, *, evicts: bool = True) -> bytes:
        """Return a message in which so many blocks are stored, and as many evicted."""
        prompts = [[random.getrandbits(64) for _ in range(PROMPT_BLOCKS)] for _ in range(num_blocks // PROMPT_BLOCKS)]
        gone = [self._held.popleft() for _ in prompts] if evicts else []
        self._held += prompts
        for prompt in prompts:
            self._index.add(self._index.find(prompt), self._row)
        self._sequence += 1
        changes = PrefixChanges(
            first_sequence=self._sequence,
            removed=[block for prompt in gone for block in prompt],
            stored=[PrefixChain(blocks=prompt) for prompt in prompts],
        )
        response = WatchKVEventsResponse(sequence=self._sequence, engine_epoch=1, prefix_changes=changes)
        return response.SerializeToString()

    def take(self, message: bytes) -> None:
        for _ in self._follower.take(WatchKVEventsResponse.FromString(message)):
            pass


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--tokens-per-second", type=int, default=10_000, help="uncached prompt tokens of an engine")
    parser.add_argument("--held-blocks", type=int, default=4096, help="in each engine's cache")
    options = parser.parse_args()
    random.seed(1)
    index = PrefixIndex(PREFIX_INDEX_MIB << 20)
    index.remove([0], 0)  # from the first eviction on, all blocks can be searched for
    caches = [Cache(index, row, options.held_blocks) for row in range(options.engines)]
    interval = max(report_interval(options.engines) * INTERVALS, 0.001)
    blocks = max(round(options.tokens_per_second * interval / BLOCK_SIZE), PROMPT_BLOCKS)
    messages = [(cache, cache.message(blocks)) for cache in caches]
    begin = time.process_time()
    for cache, message in messages:
        cache.take(message)
    seconds = (time.process_time() - begin) / len(messages)
    size = sum(len(message) for _, message in messages) / len(messages)
    print("| engines | messages a second | bytes of one | µs of one | share of a core | MB a second |")
    print("|---|---|---|---|---|---|")
    rate = options.engines / interval
    print(
        f"| {options.engines:,} | {rate:,.0f} | {size:,.0f} | {seconds * 1e6:.0f} | {rate * seconds:.2f} "
        f"| {rate * size / 1e6:.1f} |"
    )


if __name__ == "__main__":
    main()
