"""Adapters of a loaded model: which layers have them, and over which bases."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.gpu_worker.kernels.library import load_lora
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.lora.adapted_linear import AdaptedRows, CurrentRows, LoraLinear
from tokenloom.gpu_worker.lora.adapter import Adapter, Layout
from tokenloom.gpu_worker.lora.slots import LoraSlots

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


def test_a_slot_that_could_not_be_filled_is_filled_again(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, adapter, save_adapter(tmp_path / "other", model, seed=1))
    first, second = digests_of(engine)
    expected = engine.generate([PROMPT], [8], adapters=[second])
    engine.generate([PROMPT], [8], adapters=[first])
    slots: LoraSlots = engine.core.executor._worker._loras  # type: ignore[attr-defined]
    # All layers let go of the first adapter, and three take the second one.
    occupy, left = LoraLinear.occupy, iter(range(len(slots._layers) + 3))

    def occupy_some(self: LoraLinear, *args: Any) -> None:
        if next(left, None) is None:
            raise MemoryError
        occupy(self, *args)

    monkeypatch.setattr(LoraLinear, "occupy", occupy_some)
    with pytest.raises(MemoryError):
        slots.occupy([second])
    monkeypatch.setattr(LoraLinear, "occupy", occupy)
    slots.occupy([second])
    assert engine.generate([PROMPT], [8], adapters=[second]) == expected


def test_without_the_option_no_layer_is_wrapped(model: Path) -> None:
    plain, enabled = Engine(model, num_blocks=32, max_model_len=64, max_num_seqs=4), make_engine(model)
    counts = []
    for engine in (plain, enabled):
        worker = engine.core.executor._worker  # type: ignore[attr-defined]
        parts = [part for layer in worker._model._layers for part in (layer._mix, layer.mlp)]
        counts.append(sum(isinstance(each, LoraLinear) for part in parts for each in vars(part).values()))
    assert counts == [0, 8]


def test_dropped_layers_give_their_memory_back(model: Path, adapter: Path) -> None:
    engine = make_engine(model, adapter)
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    assert len(worker._loras._layers) == 9
    worker.sleep(1)
    assert not worker._loras._layers
    worker.wake_up(["weights", "kv_cache"])
    assert len(worker._loras._layers) == 9


@pytest.mark.parametrize(
    ("entries", "copies"),
    [({}, 1), ({"use_dora": True}, 2), ({"kinds": ("o_proj",), "modules_to_save": ["k_proj"]}, 2)],
)
def test_memory_for_adapters_is_left_out_of_the_pool(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, Any], copies: int
) -> None:
    """Those that are named at the start are read after the pool was sized."""
    adapter = save_adapter(tmp_path / "adapter", model, **entries)
    worker = make_engine(model, adapter).core.executor._worker  # type: ignore[attr-defined]
    asked = []
    monkeypatch.setattr(worker._platform, "kv_memory", lambda activations, _: asked.append(activations) or 0)
    worker.determine_available_memory()
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert asked == [worker._steps.largest.activation_bytes + copies * size]
    assert worker._loras._adapters[worker._loras.load(adapter).digest].nbytes > size * (copies - 0.5)


def test_steps_with_magnitudes_are_recorded(model: Path, tmp_path: Path) -> None:
    """Factors of outputs are the kernel's; whole weights, which PyTorch multiplies by, are not recorded."""
    magnitudes = save_adapter(tmp_path / "magnitudes", model, use_dora=True)
    whole = save_adapter(tmp_path / "whole", model, kinds=("o_proj",), modules_to_save=["k_proj"])
    engine = make_engine(model, magnitudes, whole)
    recorded = engine.core.executor._worker._runner._recordings  # type: ignore[attr-defined]
    for digest, sizes in zip(digests_of(engine), ({True}, {True}), strict=True):
        engine.generate([PROMPT], [8], adapters=[digest])
        assert recorded is None or {adapted for _, _, adapted in recorded._steps} == sizes
        assert recorded is None or not recorded._failed


def test_experts_that_no_adapter_changes_are_not_wrapped(tmp_path: Path) -> None:
    model = save_random("mixtral", tmp_path, num_local_experts=2, num_experts_per_tok=1)
    attention = save_adapter(tmp_path / "attention", model, kinds=("q_proj", "o_proj"))
    engine = make_engine(model, attention)
    plain, adapted = engine.generate([PROMPT, PROMPT], [8, 8], adapters=[b"", *digests_of(engine)])
    assert plain != adapted
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    assert not [layer for layer in worker._loras._layers if "expert" in layer._names[0]]


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    model = save_random("gpt2", tmp_path, vocab_size=503, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(ValueError, match="enable_lora: no layer of this model can have an adapter"):
        make_engine(model)


def test_a_wrong_adapter_ends_the_start(model: Path, tmp_path: Path) -> None:
    wrong = save_adapter(tmp_path / "wrong", model, layer_replication=[[0, 1]])
    with pytest.raises(ValueError, match=r"lora_modules: wrong: adapter_config\.json: layer_replication is set"):
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
    recorded = engine.core.executor._worker._runner._recordings  # type: ignore[attr-defined]
    assert recorded is None or {adapted for _, _, adapted in recorded._steps} == {False, True}


NAMES, INPUTS, OUTPUTS = ("q_proj", "k_proj", "v_proj"), 43, (72, 16, 21)
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Layer:
    """A merged layer with an adapter in each slot; the last one changes only the second part."""

    def __init__(self, dtype: torch.dtype, ranks: Sequence[int], *, use_kernel: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        library = load_lora()
        self.weight = torch.randn(sum(OUTPUTS), INPUTS, generator=generator).to(dtype)
        self.current = CurrentRows()
        kernel = library.add_lora if use_kernel else None
        base = make_linear(self.weight)
        self.layer = LoraLinear(base, NAMES, INPUTS, OUTPUTS, len(ranks), self.current, kernel, dtype)
        self.changes = []
        layout = Layout(library.rank_step(), library.panel_outputs()) if use_kernel else Layout()
        for slot, rank in enumerate(ranks):
            names = NAMES if slot < len(ranks) - 1 else NAMES[1:2]
            parts, changes = {}, []
            for name, outputs in zip(NAMES, OUTPUTS, strict=True):
                a = torch.randn(rank, INPUTS, generator=generator).to(dtype).float()
                b = (torch.randn(outputs, rank, generator=generator) * 0.1).to(dtype).float()
                changes.append(b @ a if name in names else torch.zeros(outputs, INPUTS))
                if name in names:
                    parts[name] = layout.arrange(a, b, dtype)
            self.layer.occupy(slot, Adapter(bytes([slot]), rank, parts), CPU)
            self.changes.append(torch.cat(changes))

    def __call__(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        self.current.set(AdaptedRows(np.array(slots, dtype=np.int32), len(self.changes)))
        return self.layer(x)

    def expected(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        merged = [self.weight.float() + (self.changes[slot] if slot >= 0 else 0) for slot in slots]
        return torch.cat([F.linear(row.float()[None], weight) for row, weight in zip(x, merged, strict=True)])


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots", [[0], [0, -1, 1, 2, 0, 1, -1, 1], [2, 2, -1], [1] * 70 + [-1] * 3 + [0] * 33], ids=len
)
def test_rows_get_the_change_of_their_adapter(use_kernel: bool, dtype: torch.dtype, slots: list[int]) -> None:
    layer = Layer(dtype, ranks=(16, 5, 24), use_kernel=use_kernel)
    x = torch.randn(len(slots), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = layer(x, slots).float(), layer.expected(x, slots)
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def test_a_row_does_not_depend_on_the_others() -> None:
    layer = Layer(torch.float32, ranks=(16, 16), use_kernel=True)
    layer.layer._base = lambda x, dtype=None: torch.zeros(len(x), sum(OUTPUTS))
    x = torch.randn(90, INPUTS, generator=torch.Generator().manual_seed(1))
    slots = [0, 1, -1] * 30
    together = layer(x, slots)
    for row in (0, 1, 40, 87):
        assert torch.equal(layer(x[row : row + 1], slots[row : row + 1])[0], together[row])
    assert not together[2::3].any()


def test_without_rows_only_the_base_computes() -> None:
    layer = Layer(torch.float32, ranks=(16,), use_kernel=True)
    x = torch.randn(3, INPUTS)
    layer.current.rows = None
    assert torch.equal(layer.layer(x), layer.layer._base(x))


def test_an_emptied_slot_changes_nothing() -> None:
    layer = Layer(torch.float32, ranks=(16, 4), use_kernel=True)
    layer.layer.occupy(0, None, CPU)
    x = torch.randn(2, INPUTS)
    torch.testing.assert_close(layer(x, [0, -1]), F.linear(x, layer.weight))


def test_a_slot_that_is_not_there_never_reaches_the_kernel() -> None:
    layer = Layer(torch.float32, ranks=(16, 4), use_kernel=True)
    with pytest.raises(AssertionError, match="slot 2 of 2, which is not there"):
        layer(torch.randn(2, INPUTS), [2, -1])


def test_a_rank_without_experts_has_no_adapters_of_them() -> None:
    """It would leave them out of its own requests' rows, which go to the experts of others."""
    slots = LoraSlots(LoraConfig(enable=True), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"none of the 2 experts, .* let at most 2 workers share them"):
        slots.spread("model.layers.0.mlp.experts", 2)
