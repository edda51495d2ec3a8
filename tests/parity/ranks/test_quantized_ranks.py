"""Several ranks compute weights that are stored in few bits, each its part of them, with the tokens of one rank."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS, FORMATS
from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import round_to_8_bits, take_part
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear as linears
from tokenloom.gpu_worker.layers import quantized_linear
from tokenloom.gpu_worker.model_slot import tensors_of
from tokenloom.gpu_worker.parallel.sharding import ShardedDimension, length

SHAPES = [(2, 1), (1, 2), (2, 2)]
PROMPTS = [[(index * 7 + position * 3) % 480 + 5 for position in range(length)] for index, length in enumerate((70, 3))]
LIMITS = [12] * len(PROMPTS)


def make(path: Path, directory: Path, *shape: int, **options: Any) -> Engine:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    directory.mkdir()
    return Engine(path, budget=64, num_blocks=80, executor=executor, parallel=parallel(*shape), **options)


def check(path: Path, tmp_path: Path, shapes: Sequence[tuple[int, ...]], **options: Any) -> None:
    """Compare the tokens of ranks, of which ``shapes`` gives the sizes of groups, with those of one."""
    expected = Engine(path, budget=64, num_blocks=80, **options).generate(PROMPTS, LIMITS)
    for shape in shapes:
        engine = make(path, tmp_path / "-".join(map(str, shape)), *shape, **options)
        assert engine.generate(PROMPTS, LIMITS) == expected
        engine.core.shutdown()


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_every_format(name: str, tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path / "model", *FORMATS[name])
    check(path, tmp_path, SHAPES if name in ("gptq", "awq") else SHAPES[:1])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_gguf_files(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path, kind)
    check(path, tmp_path, SHAPES)


def test_weights_that_are_rounded_at_load(tmp_path: Path) -> None:
    path = save_random("qwen3", tmp_path, head_dim=32, intermediate_size=128)
    check(path, tmp_path, SHAPES, quantization="int4")


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    source = save_random("qwen3_moe", tmp_path, **sizes)
    path, _ = formats.write(tmp_path / "model", *EXPERTS[name], source=source)
    check(path, tmp_path, [(2, 1)])


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    check(write_gpt_oss(tmp_path / "model"), tmp_path, [(2, 1)])


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8, by block", "w4a16"])
def test_ranks_keep_few_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 ranks unpack no layer to floats, and each keeps its part of the outputs and inputs."""
    made: list[tuple[object, int]] = []
    original = linears.make_packed

    def make_packed(*arguments: Any) -> Any:
        layer = original(*arguments)
        made.append((layer, sum(length(outputs) * length(inputs) for outputs, inputs in arguments[3])))
        return layer

    path, _ = formats.write(tmp_path / "model", *FORMATS[name])
    monkeypatch.setattr(linears, "make_packed", make_packed)
    Engine(path, budget=64, num_blocks=80, dtype="bfloat16")
    whole = sum(size for _, size in made)
    made.clear()
    engine = make(path, tmp_path / "two", 2, 1, dtype="bfloat16")
    assert len(engine.generate(PROMPTS, LIMITS)[0]) == LIMITS[0]
    engine.core.shutdown()
    assert all(layer is not None for layer, _ in made)
    assert sum(size for _, size in made) == whole, "both ranks together have the whole"


@pytest.fixture(params=["by group", "by row"])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How inputs are rounded to int8: as on processors without the matrix unit, or as on those with it, by PyTorch."""

    def refuse(*_: object) -> None:
        raise KernelsUnavailable("none")

    monkeypatch.setattr(quantized_linear, "load_int8", refuse)
    if request.param == "by row":
        monkeypatch.setattr(quantized_linear, "QuantizedLinear", refuse)
    return str(request.param)


CONTEXT = (2, 1, 2)


def test_inputs_that_are_rounded_to_int8(rounding: str, tmp_path: Path) -> None:
    path = save_random("qwen3", tmp_path, head_dim=32, intermediate_size=128)
    check(path, tmp_path, [*SHAPES, CONTEXT], quantization="int8-dynamic")


def test_files_of_int8(rounding: str, tmp_path: Path) -> None:
    """In bfloat16, in which the layers compute with the file's integers. Context parallel ranks, which merge parts of
    attention that are rounded to it, are compared in float32."""
    path, _ = formats.write(tmp_path / "model", *FORMATS["w8a8"])
    check(path, tmp_path, SHAPES, dtype="bfloat16")
    check(path, tmp_path, [CONTEXT])


def test_experts_of_int8(rounding: str, tmp_path: Path) -> None:
    """Each rank has a part of every expert."""
    sizes: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    path = save_random("qwen3_moe", tmp_path, **sizes)
    check(path, tmp_path, [(2, 1)], quantization="int8-dynamic")


def test_each_rank_keeps_half_of_the_integers(rounding: str, tmp_path: Path) -> None:
    path = save_random("qwen3", tmp_path, head_dim=32, intermediate_size=128)
    whole = Engine(path, quantization="int8-dynamic")
    two = make(path, tmp_path / "two", 2, 1, quantization="int8-dynamic")
    (all_bytes,), parts = integers_of(whole), integers_of(two)
    two.core.shutdown()
    assert all_bytes > 0
    assert parts == [all_bytes // 2] * 2


def integers_of(engine: Engine) -> list[int]:
    """Return the bytes of the packed integers of each worker's layers."""
    executor = engine.core.executor
    workers = executor.workers if isinstance(executor, RankThreads) else [executor._worker]  # type: ignore[attr-defined]
    models = [worker._slot.model for worker in workers]  # type: ignore[attr-defined]
    dtypes = (torch.int8, torch.uint8)
    return [sum(tensor.nbytes for tensor in tensors_of(model) if tensor.dtype in dtypes) for model in models]


@pytest.mark.parametrize("group", [32, 64, 256])
def test_parts_that_end_within_a_group(group: int) -> None:
    weight = round_to_8_bits(torch.randn(8, 256, generator=torch.Generator().manual_seed(1)), group)
    inputs, outputs = ShardedDimension(256, ((96, 192),)), ShardedDimension(8, ((0, 2), (4, 6)))
    part = weight.part(outputs, inputs)
    assert part.group == (96 if group == 256 else math.gcd(group, 96)), "one group of all inputs is each part's"
    assert torch.equal(part.dequantize(), take_part(weight.dequantize(), (outputs, inputs)))
