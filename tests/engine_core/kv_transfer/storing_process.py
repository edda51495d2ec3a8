"""The process of an engine's core that shares a folder: reads lists of prompts, and writes what came of each."""

import json
import os
import sys
import time
from itertools import count
from typing import Any

from tests.engine_core.kv_transfer.storing_core import StoringCore
from tokenloom.engine_core.kv_transfer import block_store


def stop_in_write(number: int) -> None:
    """Let the process stop for ever in the middle of its write with this number."""
    write, numbers = block_store._write, count(1)

    def write_half(file: int, data: Any) -> None:
        if len(data) == block_store.HEAD_BYTES and next(numbers) == number:
            write(file, memoryview(data)[:20])
            print(json.dumps({"stopped": number}), flush=True)
            time.sleep(3600)
        write(file, data)

    block_store._write = write_half


def main() -> None:
    url, store_bytes, stops_in_write = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if stops_in_write:
        stop_in_write(stops_in_write)
    core = StoringCore(url, store_bytes=store_bytes, num_blocks=40)
    for line in sys.stdin:
        tokens = core.run(*json.loads(line), settles=True)
        print(json.dumps({"tokens": tokens, "loaded": core.num_loaded, "saved": core.num_saved}), flush=True)
    core.core.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
