import msgspec
import pytest

from tests.engine_core.helpers import make_config, make_worker
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor


def test_only_async_scheduling_needs_a_thread() -> None:
    assert isinstance(make_executor(make_config(), make_worker), UniProcExecutor)
    executor = make_executor(make_config(async_scheduling=True), make_worker)
    assert isinstance(executor, ThreadedExecutor)
    executor.shutdown()


def test_an_unknown_backend_is_refused_by_name() -> None:
    parallel = ParallelConfig(distributed_executor_backend="uni", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="distributed_executor_backend is 'uni'; use uni for one worker, mp or ray"):
        make_executor(msgspec.structs.replace(make_config(), parallel=parallel), make_worker)
