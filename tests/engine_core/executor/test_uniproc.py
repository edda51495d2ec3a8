import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_worker
from tokenloom.engine_core.executor.uniproc import UniProcExecutor


def test_results_of_calls_by_name_are_plain_data() -> None:
    executor = UniProcExecutor(make_worker(make_config()))
    (model,) = executor.collective_rpc("load_model")
    assert isinstance(model, dict)
    assert model["vocab_size"] == VOCAB_SIZE
    assert executor.collective_rpc("initialize_kv_cache", 4) == [None]
    assert executor.kv_pool().num_blocks == 4


def test_undeclared_methods_and_wrong_arguments_are_refused() -> None:
    executor = UniProcExecutor(make_worker(make_config()))
    with pytest.raises(ValueError, match="HashWorker has no method '_wait' to call; declared: "):
        executor.collective_rpc("_wait")
    with pytest.raises(msgspec.ValidationError):
        executor.collective_rpc("initialize_kv_cache", "many")
