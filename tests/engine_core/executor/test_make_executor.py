from tests.engine_core.helpers import make_config, make_worker
from tokenloom.engine_core.executor import make_executor
from tokenloom.engine_core.executor.threaded import ThreadedExecutor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor


def test_only_async_scheduling_needs_a_thread() -> None:
    assert isinstance(make_executor(make_config(), make_worker), UniProcExecutor)
    executor = make_executor(make_config(async_scheduling=True), make_worker)
    assert isinstance(executor, ThreadedExecutor)
    executor.shutdown()
