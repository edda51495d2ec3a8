"""The demo model in each quantized format of safetensors gives the logits of the weights that it then has."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.formats import Quantize
from tokenloom.gpu_worker.attention.cache import kv_layout
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.quantization.small_floats import PackedFloats
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint, RenamedSource, open_files
from tokenloom.gpu_worker.layers.fp8_linear import WidenedLinear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear, QuantizedLinear
from tokenloom.gpu_worker.model_slot import ModelSlot
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.model_files.model_path import DEMO_MODEL

RunModel = Callable[..., list[Tensor]]
EditConfig = Callable[..., None]

PROMPT = torch.arange(100, 148)
UP = "model.layers.0.mlp.up_proj"
KV_DOWN = "model.layers.0.self_attn.kv_a_proj_with_mqa"


def packed_config(symmetric: bool, **weights: Any) -> dict[str, Any]:
    arguments = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None, "output_activations": None}
    return compressed("pack-quantized", group)


def compressed(stored: str, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.20.0",
    }


def int8_config(symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False, "symmetric": symmetric} | weights
    return compressed(
        "int-quantized",
        {"targets": ["Linear"], "weights": weights | {"observer": "minmax"}, "input_activations": inputs},
    )


def float_config(strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return compressed("float-quantized", {"targets": ["Linear"], "weights": weights, "input_activations": inputs})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (formats.gptq(4, 128, symmetric=True), GPTQ),
    "gptq, 8 bits, one group": (
        formats.gptq(8, -1, symmetric=False),
        GPTQ | {"bits": 8, "group_size": -1, "sym": False, "meta": {"quantizer": "x"}},
    ),
    "gptq, zero points": (formats.gptq(4, 32, symmetric=False), GPTQ | {"group_size": 32, "sym": False}),
    "gptq, second version": (
        formats.gptq(4, 64, symmetric=False, version=2),
        GPTQ | {"group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, second version that says the first": (formats.gptq(4, 128, symmetric=True, version=2), GPTQ),
    "gptq, order of activations": (
        formats.gptq(4, 32, symmetric=False, shuffle=True),
        GPTQ | {"group_size": 32, "sym": False, "desc_act": True},
    ),
    "awq": (formats.awq(64), AWQ),
    # The names of quant_config.json, as llm-awq and AutoAWQ write it.
    "awq, older names": (
        formats.awq(64),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
    ),
    "w4a16": (formats.w4a16(32, symmetric=True), packed_config(True)),
    "w4a16, zero points": (formats.w4a16(64, symmetric=False), packed_config(False, group_size=64)),
    "w8a16, by channel": (
        formats.w4a16(-1, symmetric=False, bits=8),
        packed_config(False, num_bits=8, strategy="channel", group_size=None),
    ),
    "w4a16, order of activations": (
        formats.w4a16(32, symmetric=False, shuffle=True),
        packed_config(False, actorder="group"),
    ),
    "w8a8": (formats.int8(), int8_config()),
    "w8a8, by group": (formats.int8(group=32), int8_config(strategy="group", group_size=32)),
    "w8a8, order of activations": (
        formats.int8(symmetric=False, group=32, shuffle=True),
        int8_config(symmetric=False, strategy="group", group_size=32, actorder="group"),
    ),
    "w8a8, zero points": (formats.int8(symmetric=False), int8_config(symmetric=False)),
    "compressed fp8, by tensor": (formats.fp8("tensor"), float_config("tensor")),
    "compressed fp8, by channel": (formats.fp8("channel"), float_config("channel")),
    "compressed fp8, by block": (formats.fp8("block"), float_config("block", block_structure=[128, 128])),
    "fp8, by tensor": (formats.fp8("tensor", input_scale=torch.tensor(0.1)), FP8 | {"activation_scheme": "static"}),
    "fp8, by block": (formats.fp8("block", "scale_inv", block=96), FP8 | {"weight_block_size": [96, 96]}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(name: str, tmp_path: Path, run_model: RunModel) -> None:
    quantized, plain = formats.write(tmp_path, *FORMATS[name])
    with torch.inference_mode():
        found, expected = (
            run_model(load_model(path, "float32"), [PROMPT], [[len(PROMPT)]])[0] for path in (quantized, plain)
        )
    assert (found - expected).abs().max() <= 1e-4
    ModelLoader().check(quantized)  # reads no tensors' content


EXPERTS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq, zero points": FORMATS["gptq, zero points"],
    "awq": (formats.awq(32), AWQ | {"group_size": 32}),
    "w4a16": FORMATS["w4a16"],
    "w8a8": FORMATS["w8a8"],
    "fp8, by block": (formats.fp8("block", "scale_inv", block=32), FP8 | {"weight_block_size": [32, 32]}),
}


@pytest.mark.parametrize("name", EXPERTS)
@torch.inference_mode()
def test_experts_are_read_one_by_one(
    name: str, tmp_path: Path, save_checkpoint: Callable[..., Path], run_model: RunModel
) -> None:
    source = save_checkpoint("qwen3_moe", norm_topk_prob=True)
    quantized, plain = formats.write(tmp_path / "written", *EXPERTS[name], source=source)
    prompt = torch.arange(100, 130)
    found, expected = (run_model(load_model(path, "float32"), [prompt], [[30]])[0] for path in (quantized, plain))
    assert (found - expected).abs().max() <= 1e-4
    as_stored = run_model(load_model(quantized, "bfloat16"), [prompt], [[30]])[0]
    assert torch.isfinite(as_stored).all()


def test_w8a8_is_computed_in_int8(tmp_path: Path, run_model: RunModel) -> None:
    """The layers keep the stored integers, so a model in bfloat16 rounds only its inputs."""
    quantized, plain = formats.write(tmp_path, *FORMATS["w8a8"])
    with torch.inference_mode():
        model = load_model(quantized, "bfloat16")
        found = run_model(model, [PROMPT], [[len(PROMPT)]])[0].log_softmax(-1)
        expected = run_model(load_model(plain, "float32"), [PROMPT], [[len(PROMPT)]])[0].log_softmax(-1)
    assert isinstance(vars(vars(model)["_layers"][0].mlp)["_down"], Int8Linear)
    assert ((found - expected).abs() * expected.exp()).sum(-1).mean() < 0.05


@pytest.mark.parametrize(("name", "bits"), [("awq", 4), ("w4a16", 4), ("gptq, 8 bits, one group", 8)])
def test_groups_are_computed_as_they_are_stored(name: str, bits: int, tmp_path: Path, run_model: RunModel) -> None:
    """The layers keep the stored integers, so a model in bfloat16 rounds only its inputs."""
    quantized, plain = formats.write(tmp_path, *FORMATS[name])
    with torch.inference_mode():
        model = load_model(quantized, "bfloat16")
        found = run_model(model, [PROMPT], [[len(PROMPT)]])[0].log_softmax(-1)
        expected = run_model(load_model(plain, "float32"), [PROMPT], [[len(PROMPT)]])[0].log_softmax(-1)
    down = vars(vars(model)["_layers"][0].mlp)["_down"]
    assert isinstance(down, QuantizedLinear)
    assert down.bits == bits
    assert ((found - expected).abs() * expected.exp()).sum(-1).mean() < 0.05


@pytest.mark.parametrize("name", [name for name in FORMATS if "fp8" in name])
def test_floats_of_8_bits_stay_as_they_are_stored(name: str, tmp_path: Path, run_model: RunModel) -> None:
    """The layers keep the stored numbers and scales: closer to float32 than weights that are rounded to bfloat16."""
    quantized, plain = formats.write(tmp_path, *FORMATS[name])
    with torch.inference_mode():
        model = load_model(quantized, "bfloat16")
        found, rounded, expected = (
            run_model(each, [PROMPT], [[len(PROMPT)]])[0].log_softmax(-1)
            for each in (model, load_model(plain, "bfloat16"), load_model(plain, "float32"))
        )
    mlp, attention = vars(vars(model)["_layers"][0].mlp), vars(vars(vars(model)["_layers"][0])["_mix"])
    for layer in (mlp["_gate_up"], mlp["_down"], attention["_qkv"], attention["_out"]):
        assert isinstance(layer, WidenedLinear)
    error, usual = ((each - expected).abs().mean() for each in (found, rounded))
    assert error <= 1.1 * usual


@torch.inference_mode()
def test_experts_keep_floats_of_8_bits(
    tmp_path: Path, save_checkpoint: Callable[..., Path], run_model: RunModel
) -> None:
    quantized, plain = formats.write(
        tmp_path / "written", *EXPERTS["fp8, by block"], source=save_checkpoint("qwen3_moe", norm_topk_prob=True)
    )
    model = load_model(quantized, "bfloat16")
    experts = vars(vars(model)["_layers"][0].mlp)["_experts"]
    assert all(
        isinstance(vars(each)[part], WidenedLinear) for each in experts.values() for part in ("_gate_up", "_down")
    )
    prompt = torch.arange(100, 130)
    found, expected = (
        run_model(each, [prompt], [[30]])[0].log_softmax(-1) for each in (model, load_model(plain, "float32"))
    )
    assert ((found - expected).abs() * expected.exp()).sum(-1).mean() < 0.05


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@torch.inference_mode()
def test_deepseek_is_read_as_it_is_published(
    model_impl: str, tmp_path: Path, save_checkpoint: Callable[..., Path], run_model: RunModel
) -> None:
    """The entries and the names are those of deepseek-ai/DeepSeek-V3 (config.json, model.safetensors.index.json), where
    the last blocks of ``kv_a_proj_with_mqa`` are not whole."""
    sizes = {"hidden_size": 256, "q_lora_rank": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "head_dim": 16}
    sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64, "num_key_value_heads": 4}
    routing = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    source = save_checkpoint("deepseek_v3", first_k_dense_replace=1, **sizes, **routing)
    entries = FP8 | {"weight_block_size": [128, 128]}
    quantized, plain = formats.write(tmp_path / "w", formats.fp8("block", "scale_inv"), entries, source=source)
    assert load_file(quantized / "model.safetensors")[f"{KV_DOWN}.weight_scale_inv"].shape == (2, 2)
    prompt = torch.arange(100, 130)
    found, expected = (
        run_model(load_model(path, "float32", model_impl=model_impl), [prompt], [[30]])[0]
        for path in (quantized, plain)
    )
    assert (found - expected).abs().max() <= 1e-4
    as_stored = run_model(load_model(quantized, "bfloat16", model_impl=model_impl), [prompt], [[30]])[0]
    difference = (as_stored.log_softmax(-1) - expected.log_softmax(-1)).abs() * expected.softmax(-1)
    assert difference.sum(-1).mean() < 0.15


@pytest.mark.parametrize("stored_as", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_stored_as_exponents(stored_as: torch.dtype, tmp_path: Path, run_model: RunModel) -> None:
    """As MXFP8's files and ``scale_fmt: ue8m0`` have them (transformers' integrations/finegrained_fp8.py)."""
    entries = FP8 | {"weight_block_size": [64, 64], "scale_fmt": "ue8m0"}
    path, plain = formats.write(tmp_path, formats.fp8("block", "scale_inv", block=64), entries)
    tensors, dequantized = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight, exponents = name.removesuffix("_scale_inv"), tensors[name].log2().ceil()
        tensors[name] = (exponents + 127).to(torch.uint8).view(stored_as)
        outputs, inputs = tensors[weight].shape
        spread = exponents.exp2().repeat_interleave(64, 0)[:outputs].repeat_interleave(64, 1)[:, :inputs]
        dequantized[weight] = tensors[weight].float() * spread
    save_file(tensors, path / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors")
    with torch.inference_mode():
        found, expected = (run_model(load_model(each, "float32"), [PROMPT], [[48]])[0] for each in (path, plain))
    assert (found - expected).abs().max() <= 1e-4


def test_the_scheme_is_part_of_the_configuration(tmp_path: Path) -> None:
    names = set()
    for name in ("gptq", "awq", "w4a16", "w8a8", "compressed fp8, by block", "fp8, by block"):
        directory = tmp_path / name
        directory.mkdir()
        scheme = load_model_config(formats.write(directory, *FORMATS[name])[0]).scheme
        assert scheme is not None
        names.add(scheme.name)
    assert names == {
        "gptq-int4", "awq-int4", "compressed-tensors-int4", "compressed-tensors-int8", "compressed-tensors-fp8", "fp8"
    }  # fmt: skip


REFUSED = {
    "another method": ("gptq", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
    "bits of gptq": ("gptq", {"bits": 3}, "bits must be 4 or 8, found 3"),
    "layers of other bits": ("gptq", {"dynamic": {"x": {"bits": 8}}}, "dynamic is not supported"),
    "another layout of gptq": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq"),
    "an unknown entry": ("gptq", {"rotation": "hadamard"}, "not supported: rotation = "),
    "another layout of awq": ("awq", {"version": "gemv"}, "version must be gemm"),
    "bits of awq": ("awq, older names", {"w_bit": 3}, "w_bit must be 4, found 3"),
    "two sizes of groups": ("awq", {"q_group_size": 32}, "q_group_size must equal group_size = 64, found 32"),
    "sparse weights": ("w8a8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "another format": ("w8a8", {"format": "nvfp4-pack-quantized"}, "format is not supported: 'nvfp4-pack-quantized'"),
    "a block": ("fp8, by block", {"weight_block_size": [128]}, "weight_block_size must be a list of two"),
    "a format of floats": ("fp8, by block", {"fmt": "e5m2"}, "fmt must be e4m3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str, tmp_path: Path, edit_config: EditConfig) -> None:
    name, entries, message = REFUSED[case]
    quantize, config = FORMATS[name]
    path, _ = formats.write(tmp_path, quantize, config | entries)
    with pytest.raises(ValueError, match="quantization_config.*" + message.replace("[", r"\[")):
        load_model_config(path)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("gptq", "scales", f"no tensor {UP}.scales, which its quantization_config asks for"),
        ("awq", "qzeros", f"no tensor {UP}.qzeros"),
        ("w4a16", "weight_shape", f"no tensor {UP}.weight_shape"),
        ("w8a8", "weight_scale", f"{UP}.weight is stored as torch.int8 without a scale"),
    ],
)
def test_a_missing_part_is_named(name: str, part: str, message: str, tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path, *FORMATS[name])
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{UP}.{part}"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_a_part_of_another_shape_is_named(tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path, *FORMATS["gptq"])
    tensors = load_file(path / "model.safetensors")
    tensors[f"{UP}.scales"] = tensors[f"{UP}.scales"][:1].clone()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{UP}.scales has shape \[1, 640\], .* asks for \[2, 640\]"):
        load_model(path)


def test_rows_are_unpacked_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in float32 that are made on the way are small, so that loading takes the result and one layer at most."""
    path, _ = formats.write(tmp_path, *FORMATS["fp8, by tensor"])
    asked: list[int] = []
    unpack = PackedFloats.rows

    def rows(self: PackedFloats, first: int, last: int) -> Tensor:
        asked.append((last - first) * self.shape[1])
        return unpack(self, first, last)

    monkeypatch.setattr(PackedFloats, "rows", rows)
    monkeypatch.setattr("tokenloom.gpu_worker.checkpoint.files.quantized_weight.AT_ONCE", 1 << 15)
    config = load_model_config(path)
    with Checkpoint(path, torch.bfloat16, torch.device("cpu"), config.scheme) as checkpoint:
        weight = checkpoint.take(f"{UP}.weight", 640, 256)
    assert weight.dtype == torch.bfloat16
    assert len(asked) == 5
    assert max(asked) <= 1 << 15


@pytest.mark.parametrize(
    "name", ["gptq, order of activations", "w4a16, order of activations", "w8a8, order of activations"]
)
@pytest.mark.parametrize("wrong", [-2, 8, 2**31 - 1])
def test_a_group_without_a_scale_is_named(name: str, wrong: int, tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path, *FORMATS[name])
    tensors = load_file(path / "model.safetensors")
    order = next(f"{UP}.{part}" for part in ("g_idx", "weight_g_idx") if f"{UP}.{part}" in tensors)
    tensors[order][7] = wrong
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{order} names a group that has no scale: .* from 0 to 7"):
        load_model(path)


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "compressed fp8, by channel"])
def test_an_order_of_minus_one_is_none(name: str, tmp_path: Path, run_model: RunModel) -> None:
    """compressed-tensors writes it where the inputs are in no order of their own. Another one of floats, whose scales
    know no groups of inputs, is refused."""
    path, plain = formats.write(tmp_path, *FORMATS[name])
    tensors = load_file(path / "model.safetensors")
    orders = {f"{each}.weight_g_idx": torch.full((256,), -1) for each in (UP, UP.replace("up", "gate"))}
    save_file(tensors | orders, path / "model.safetensors")
    with torch.inference_mode():
        found, expected = (
            run_model(load_model(each, "float32"), [PROMPT], [[len(PROMPT)]])[0] for each in (path, plain)
        )
    assert (found - expected).abs().max() <= 1e-4
    if "fp8" in name:
        save_file(tensors | {f"{UP}.weight_g_idx": torch.arange(256) // 32}, path / "model.safetensors")
        with pytest.raises(ValueError, match=f"{UP}.weight_g_idx names a group that has no scale: .* from 0 to 0"):
            load_model(path)


# Names of vllm/model_executor/model_loader/weight_utils.py (maybe_remap_kv_scale_name) and of compressed-tensors.
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale", "self_attn.v_proj.v_scale")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("w8a8", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}),
        ("fp8, by tensor", "static"),
    ],
)
def test_scales_of_a_kv_cache_change_no_other_cache(
    name: str, scheme: Any, tmp_path: Path, run_model: RunModel
) -> None:
    quantize, config = FORMATS[name]
    path, plain = formats.write(tmp_path, quantize, config | {"kv_cache_scheme": scheme})
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.{layer}.{kind}": torch.tensor([0.02]) for layer in (0, 1) for kind in KV_SCALES}
    save_file(tensors, path / "model.safetensors")
    with torch.inference_mode():
        found, expected = (
            run_model(load_model(each, "float32"), [PROMPT], [[len(PROMPT)]])[0] for each in (path, plain)
        )
    assert (found - expected).abs().max() <= 1e-4


@torch.inference_mode()
def with_8_bit_kv(path: Path, *, scaled: bool) -> Tensor:
    """Return the log probabilities behind each token of a prompt, over a cache of 8-bit floats."""
    model = load_model(path, "float32", kv_cache_dtype="fp8" if scaled else "auto")
    assert model.config.scales_kv == scaled
    config = dataclasses.replace(model.config, kv_cache_dtype="fp8")
    backend = ReferenceBackend(config, 16, torch.device("cpu"))
    count = len(PROMPT)
    plan = backend.plan(np.array([0, count]), np.array([count]), np.arange(4)[None], np.arange(count))
    hidden = model.forward(PROMPT, torch.arange(count), backend.allocate(4), plan)
    return model.compute_logits(hidden).log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2"])
def test_scales_keep_keys_and_values_within_8_bit_floats(
    kind: str, tmp_path: Path, save_checkpoint: Callable[..., Path]
) -> None:
    """Without a norm of keys, with one of each head, and with one of all. Keys and values that are a thousand times as
    large would become the largest number. Queries and the output are a thousandth, so that logits stay what they are.
    """
    quantize, config = FORMATS["fp8, by tensor"]
    config = config | {"kv_cache_scheme": "static"}
    path, _ = formats.write(tmp_path, quantize, config, source=save_checkpoint(kind))
    expected, large = with_8_bit_kv(path, scaled=False), 1024.0
    tensors = load_file(path / "model.safetensors")
    factors = {"v_proj": large, "o_proj": 1 / large}
    factors |= {"q_proj": 1 / large, "k_proj": large} if kind == "llama" else {"q_norm": 1 / large, "k_norm": large}
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if (factor := factors.get(layer.rpartition(".")[2])) and (end == "weight_scale" or "norm" in layer):
            tensors[name] = tensor.float() * factor
    prefixes = [name.removesuffix("v_proj.weight") for name in tensors if name.endswith("v_proj.weight")]
    tensors |= {f"{prefix}{each}_scale": torch.tensor(large) for prefix in prefixes for each in "kv"}
    save_file(tensors, path / "model.safetensors")
    torch.testing.assert_close(with_8_bit_kv(path, scaled=True), expected, rtol=1e-4, atol=1e-4)
    assert (with_8_bit_kv(path, scaled=False) - expected).abs().mean() > 0.1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float, tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path, *FORMATS["fp8, by tensor"])
    tensors = load_file(path / "model.safetensors") | {"model.layers.1.self_attn.v_scale": torch.tensor([scale])}
    save_file(tensors, path / "model.safetensors")
    load_model(path, "float32")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.v_scale must be one positive number"):
        load_model(path, "float32", kv_cache_dtype="fp8")


def test_caches_with_and_without_scales_have_other_layouts(tmp_path: Path) -> None:
    config = load_model(formats.write(tmp_path, *FORMATS["fp8, by tensor"])[1], "float32").config
    names = [
        kv_layout(dataclasses.replace(config, kv_cache_dtype="fp8", scales_kv=scales), 16) for scales in (True, False)
    ]
    assert [name.split("/")[1] for name in names] == ["fp8-e4m3-scaled", "fp8-e4m3"]


def with_scales(tmp_path: Path, key: float, value: float, source: Path = DEMO_MODEL) -> Path:
    """Return a checkpoint whose second layer has these scales."""
    path, _ = formats.write(tmp_path, *FORMATS["fp8, by tensor"], source=source)
    scales = {"k": key, "v": value}
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.1.self_attn.{each}_scale": torch.tensor(scale) for each, scale in scales.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scales_alone_change_no_number(
    kind: str, tmp_path: Path, run_model: RunModel, save_checkpoint: Callable[..., Path]
) -> None:
    """Over a cache that does not round: what divides keys and values in 16 bits multiplies scores and outputs."""
    path = with_scales(tmp_path, 0.0123, 0.7, save_checkpoint(kind))
    with torch.inference_mode():
        found, expected = (
            run_model(load_model(path, "bfloat16", kv_cache_dtype=dtype), [PROMPT], [[len(PROMPT)]])[0]
            for dtype in ("fp8", "auto")
        )
    assert torch.equal(found, expected)


@torch.inference_mode()
def test_scales_above_one_keep_norms_that_store_differences_from_one(
    tmp_path: Path, run_model: RunModel, save_checkpoint: Callable[..., Path]
) -> None:
    path = with_scales(tmp_path, 60.0, 0.7, save_checkpoint("gemma3_text"))
    exact, plain, scaled = (
        run_model(load_model(path, dtype, kv_cache_dtype=kv_dtype), [PROMPT], [[len(PROMPT)]])[0].float()
        for dtype, kv_dtype in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"))
    )
    assert (scaled - exact).abs().mean() < 1.3 * (plain - exact).abs().mean()


def test_weights_with_scales_are_replaced_by_others_with_scales(tmp_path: Path) -> None:
    path = with_scales(tmp_path, 0.5, 0.5)
    slot = ModelSlot(path, ModelLoader("float32", kv_cache_dtype="fp8"))
    slot.replace(with_scales(tmp_path / "other", 0.25, 0.25))
    without, _ = formats.write(tmp_path / "without", *FORMATS["fp8, by tensor"])
    with pytest.raises(ValueError, match="scales_kv is False in the new checkpoint and True in the loaded one"):
        slot.replace(without)


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "kv_scale"])
def test_each_name_of_a_scale_is_read(name: str, tmp_path: Path) -> None:
    path, _ = formats.write(tmp_path, *FORMATS["fp8, by tensor"])
    tensors = load_file(path / "model.safetensors") | {f"model.layers.1.self_attn.{name}": torch.tensor(0.5)}
    save_file(tensors, path / "model.safetensors")
    config = load_model_config(path, "float32")
    with Checkpoint(path, torch.float32, torch.device("cpu"), config.scheme) as checkpoint:
        assert [checkpoint.kv_scale(f"model.layers.{layer}.self_attn", "k") for layer in (0, 1)] == [1.0, 0.5]


def test_scales_have_the_names_of_a_plugin(tmp_path: Path) -> None:
    path = with_scales(tmp_path, 0.5, 0.25)
    config = load_model_config(path, "float32")
    source = RenamedSource(open_files(path, config.scheme), {"self_attn": "inner"})
    with Checkpoint(path, torch.float32, torch.device("cpu"), config.scheme, source=source) as checkpoint:
        assert checkpoint.has_kv_scales
        assert checkpoint.kv_scale("model.layers.1.inner", "k") == 0.5
        assert not [name for name in source.names if name.endswith("_scale")]
        assert source.names is source.names, "each tensor asks for them, so they are made once"


@torch.inference_mode()
def test_float16_divides_by_the_least_number_of_which_it_has_the_inverse(
    tmp_path: Path, run_model: RunModel, save_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.gpu_worker.models.load_model._kernels", lambda config: [])  # a CPU has none
    path = with_scales(tmp_path, 2.0**-16, 2.0**-20, save_checkpoint("llama"))
    found, expected = (
        run_model(load_model(path, "float16", kv_cache_dtype=dtype), [PROMPT], [[len(PROMPT)]])[0]
        for dtype in ("fp8", "auto")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_models_whose_files_have_no_scales_load_beside_a_cache_of_8_bit_floats(
    kind: str, save_checkpoint: Callable[..., Path]
) -> None:
    path = save_checkpoint(kind)
    assert not load_model(path, "float32", kv_cache_dtype="fp8").config.scales_kv
    assert not ModelLoader("float32", kv_cache_dtype="fp8").read_config(path).scales_kv
