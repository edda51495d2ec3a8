from concurrent.futures import ThreadPoolExecutor

from tokenloom.engine_core.data.kv_messages import KVTarget
from tokenloom.engine_core.kv_transfer.block_loads import CopyTask
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_copier import KVCopier


def test_a_copy_that_comes_after_the_end_is_dropped() -> None:
    """The KV thread runs on while the thread that steps closes: it must not fail, which would end the process."""
    executor = ThreadPoolExecutor(1)
    copier = KVCopier(None, (), executor, Failpoints(()), checksum=True)  # type: ignore[arg-type]
    copier.close()
    executor.shutdown()
    done: list[object] = []
    copier.copy(CopyTask("a", KVTarget(b"", "shm", b"", [], [], 0), [], []), lambda *outcome: done.append(outcome))
    copier.checksums([0], done.append)
    assert not done
