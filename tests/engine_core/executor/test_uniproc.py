import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_worker
from tokenloom.engine_core.data.errors import ExecutorFailedError, WeightsDamagedError
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor


def test_results_of_calls_by_name_are_plain_data() -> None:
    executor = UniProcExecutor(make_worker(make_config()))
    (model,) = executor.collective_rpc("load_model")
    assert isinstance(model, dict)
    assert model["vocab_size"] == VOCAB_SIZE
    (warm_up,) = executor.collective_rpc("initialize_kv_cache", KVCacheConfig(4, 16))
    assert msgspec.convert(warm_up, WarmUp) == WarmUp()
    assert executor.kv_pool().num_blocks == 4


def test_undeclared_methods_and_wrong_arguments_are_refused() -> None:
    executor = UniProcExecutor(make_worker(make_config()))
    with pytest.raises(ValueError, match="HashWorker has no method '_wait' to call; declared: "):
        executor.collective_rpc("_wait")
    with pytest.raises(msgspec.ValidationError):
        executor.collective_rpc("initialize_kv_cache", "many")


def test_a_worker_that_is_not_healthy_is_reported() -> None:
    worker = make_worker(make_config())
    UniProcExecutor(worker).check_health(1.0)
    worker.check_health = fail  # type: ignore[method-assign]
    with pytest.raises(ExecutorFailedError, match="the worker failed: the device is gone"):
        UniProcExecutor(worker).check_health(1.0)


def fail() -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("kind", [UniProcExecutor, ThreadedExecutor])
def test_damaged_weights_are_told_apart(kind: type[UniProcExecutor]) -> None:
    worker = make_worker(make_config())

    def damaged() -> None:
        raise WeightsDamagedError("bytes 0 to 7 of model.a have changed")

    worker.check_health = damaged  # type: ignore[method-assign]
    executor = kind(worker)
    with pytest.raises(WeightsDamagedError, match="bytes 0 to 7 of model"):
        executor.check_health(60.0)
    executor.shutdown()
