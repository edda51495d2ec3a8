"""Several workers in one process, of which chosen ones fail at chosen calls."""

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.executor.executor import PoolSpec, call_worker
from tokenloom.engine_core.executor.ranks import joined_results
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.engine_core.wire.frames import from_raw, to_raw


class Ranks(UniProcExecutor):
    """Steps the first worker. Calls by name reach all of them, in the order of their ranks.

    Attributes:
        failures: Errors that calls raise instead of reaching the worker, by rank and method.
        made: Names of the calls that each rank has made.
    """

    def __init__(self, *workers: Worker) -> None:
        super().__init__(workers[0])
        self.workers = workers
        self.failures: dict[tuple[int, str], BaseException] = {}
        self.made: list[list[str]] = [[] for _ in workers]

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        for worker in self.workers[1:]:
            worker.initialize_kv_cache(kv_cache)
        return super().initialize_kv_cache(kv_cache, pool)

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        return joined_results([self._answer(rank, method, args) for rank in range(len(self.workers))])

    def _answer(self, rank: int, method: str, args: tuple[object, ...]) -> object | Exception:
        try:
            if (failure := self.failures.get((rank, method))) is not None:
                raise failure
            result = from_raw(call_worker(self.workers[rank], method, [to_raw(arg) for arg in args]))
        except Exception as error:
            return error
        self.made[rank].append(method)
        return result


def make_ranked_core(config: EngineConfig, *workers: Worker) -> tuple[EngineCore, Ranks]:
    """Return a core over these workers."""
    ranks = Ranks(*workers)
    return EngineCore(config, ranks), ranks
