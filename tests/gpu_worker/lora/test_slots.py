"""Adapters of a loaded model: which layers have them, and over which bases."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.gpu_worker.lora.layers import LoraLinear

PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("qwen3", tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "one", model)


def make_engine(model: Path, *adapters: Path, **options: Any) -> Engine:
    modules = tuple(f"{path.name}={path}" for path in adapters)
    lora = LoraConfig(enable=True, max_loras=1, modules=modules)
    return Engine(model, lora=lora, num_blocks=32, max_model_len=64, max_num_seqs=4, **options)


def digests_of(engine: Engine) -> list[bytes]:
    assert engine.core.adapters is not None
    return [state.digest for state in engine.core.adapters.answer().adapters]


@pytest.mark.parametrize("options", [{"quantization": "int8-dynamic"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_any_base_can_have_adapters(model: Path, adapter: Path, options: dict[str, Any]) -> None:
    engine = make_engine(model, adapter, **options)
    plain, adapted = engine.generate([PROMPT, PROMPT], [8, 8], adapters=[b"", *digests_of(engine)])
    assert plain != adapted
    assert Engine(model, num_blocks=32, max_model_len=64, max_num_seqs=4, **options).generate([PROMPT], [8]) == [plain]


def test_without_the_option_no_layer_is_wrapped(model: Path) -> None:
    plain, enabled = Engine(model, num_blocks=32, max_model_len=64, max_num_seqs=4), make_engine(model)
    counts = []
    for engine in (plain, enabled):
        worker = engine.core.executor._worker  # type: ignore[attr-defined]
        parts = [part for layer in worker._model._layers for part in (layer._attention, layer.mlp)]
        counts.append(sum(isinstance(each, LoraLinear) for part in parts for each in vars(part).values()))
    assert counts == [0, 8]


def test_dropped_layers_give_their_memory_back(model: Path, adapter: Path) -> None:
    engine = make_engine(model, adapter)
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    assert len(worker._loras._layers) == 8
    worker.sleep(1)
    assert not worker._loras._layers
    worker.wake_up(["weights", "kv_cache"])
    assert len(worker._loras._layers) == 8


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    model = save_random("mixtral", tmp_path, num_local_experts=2, num_experts_per_tok=1)
    attention = save_adapter(tmp_path / "attention", model, kinds=("q_proj", "o_proj"))
    engine = make_engine(model, attention)
    plain, adapted = engine.generate([PROMPT, PROMPT], [8, 8], adapters=[b"", *digests_of(engine)])
    assert plain != adapted
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    assert not [name for name in worker._loras._shapes if "expert" in name]


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    model = save_random("gpt2", tmp_path, vocab_size=503, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(ValueError, match="enable_lora: no layer of this model can have an adapter"):
        make_engine(model)


def test_a_wrong_adapter_ends_the_start(model: Path, tmp_path: Path) -> None:
    wrong = save_adapter(tmp_path / "wrong", model, use_dora=True)
    with pytest.raises(ValueError, match=r"lora_modules: wrong: adapter_config\.json: use_dora is set"):
        make_engine(model, wrong)


def test_recorded_steps_read_the_rows_of_each_step(model: Path, adapter: Path, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", model, rank=9, seed=5)
    loras = LoraConfig(enable=True, max_loras=2, modules=(f"one={adapter}", f"other={other}"))
    engine = Engine(model, lora=loras, num_blocks=64, max_model_len=64, max_num_seqs=4)
    one, two = digests_of(engine)
    alone = {each: engine.generate([PROMPT], [8], adapters=[each])[0] for each in (b"", one, two)}
    assert len(set(map(tuple, alone.values()))) == 3
    for adapters in ([one, two, b""], [b"", one, two], [two, two, one], [b"", b"", b""]):
        assert engine.generate([PROMPT] * 3, [8] * 3, adapters=adapters) == [alone[each] for each in adapters]
    recorded = engine.core.executor._worker._runner._recorded  # type: ignore[attr-defined]
    assert recorded is None or {adapted for _, _, adapted in recorded._steps} == {False, True}
