"""Writes quantized checkpoints of the demo model, by the formats' own descriptions and not by the reader's code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.model_files.model_path import DEMO_MODEL

Parts = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Parts, Tensor]]
"""From a weight [out, in] to the stored tensors by the ends of their names, and the weight that they stand for."""

_LAYERS = (
    *(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_b")),
    *("kv_a_proj_with_mqa", "w1", "w2", "w3", "fc1", "fc2"),
)


def write(
    directory: Path,
    quantize: Quantize,
    config: dict[str, Any],
    source: Path = DEMO_MODEL,
    skipped: tuple[str, ...] = (),
    **entries: Any,
) -> tuple[Path, Path]:
    """Write a model quantized and, in another directory, with the weights that it then has; return both. Tensors whose
    names begin as ``skipped`` says are not quantized."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(_LAYERS) and not name.startswith(skipped):
            parts, plain[name] = quantize(tensor.float())
            stored |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            stored[name] = plain[name] = tensor.float()
    declared = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"} | entries
    paths = directory / "quantized", directory / "plain"
    for path, tensors, more in zip(paths, (stored, plain), ({"quantization_config": config}, {}), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(declared | more))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (source / file).exists():
                shutil.copy(source / file, path)
    return paths


def gptq(bits: int, group: int, *, symmetric: bool, version: int = 1, shuffle: bool = False) -> Quantize:
    """Pack along the inputs; version 1 stores zero points less one; ``shuffle`` scatters the inputs over the groups."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        index = np.arange(inputs) // size
        if shuffle:
            index = np.random.default_rng(0).permutation(index)
        codes, zeros, scales = _round(weight.numpy(), index, bits, symmetric)
        stored_zeros = (zeros - (2 - version)) % (1 << bits)
        parts = {
            "qweight": torch.from_numpy(_words(codes, bits).T.copy()),
            "qzeros": torch.from_numpy(_words(stored_zeros.T, bits)),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return parts, _value(codes, zeros, scales, index)

    return quantize


def awq(group: int) -> Quantize:
    """Pack along the outputs, the even ones of eight before the odd ones."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        index = np.arange(weight.shape[1]) // group
        codes, zeros, scales = _round(weight.numpy(), index, 4, symmetric=False)
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

        def pack(matrix: np.ndarray) -> Tensor:
            return torch.from_numpy(_words(matrix.reshape(len(matrix), -1, 8)[:, :, order].reshape(matrix.shape), 4))

        parts = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": torch.from_numpy(scales.T.copy())}
        return parts, _value(codes, zeros, scales, index)

    return quantize


def w4a16(group: int, *, symmetric: bool, bits: int = 4, shuffle: bool = False) -> Quantize:
    """Pack weights along the inputs and zero points along the outputs, both as offsets from the least number;
    ``shuffle`` scatters the inputs over the groups."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        size = weight.shape[1] if group == -1 else group
        index = np.arange(weight.shape[1]) // size
        if shuffle:
            index = np.random.default_rng(0).permutation(index)
        codes, zeros, scales = _round(weight.numpy(), index, bits, symmetric)
        parts = {
            "weight_packed": torch.from_numpy(_words(codes, bits)),
            "weight_scale": torch.from_numpy(scales).bfloat16().float(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(_words(zeros.T, bits).T.copy())
        if shuffle:
            parts["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return parts, _value(codes, zeros, parts["weight_scale"].numpy(), index)

    return quantize


def int8(*, symmetric: bool = True, group: int = 0, shuffle: bool = False) -> Quantize:
    """Store int8 with a scale for each output, or for each ``group`` of its inputs; ``shuffle`` scatters the inputs
    over the groups."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        index = np.arange(weight.shape[1]) // (group or weight.shape[1])
        if shuffle:
            index = np.random.default_rng(0).permutation(index)
        codes, zeros, scales = _round(weight.numpy(), index, 8, symmetric)
        parts = {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
        if shuffle:
            parts["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return parts, _value(codes, zeros, scales, index)

    return quantize


def fp8(strategy: str, suffix: str = "scale", block: int = 128, **more: Tensor) -> Quantize:
    """Store 8-bit floats with a scale for the ``tensor``, each ``channel`` or each ``block``; ``more``: other parts."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (block, block)}[strategy]
        spread = torch.zeros(outputs, inputs)
        scales = torch.zeros(-(-outputs // rows), -(-inputs // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = spread[part] = weight[part].abs().max() / 448
        values = (weight / spread).to(torch.float8_e4m3fn)
        shape = {"tensor": (), "channel": (outputs, 1), "block": scales.shape}[strategy]
        parts = {"weight": values, f"weight_{suffix}": scales.reshape(shape)}
        return parts | {part: value.clone() for part, value in more.items()}, values.float() * spread

    return quantize


def _round(weight: np.ndarray, index: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Return codes [out, in], zero points and scales [out, groups]; ``index`` is the group of each input."""
    most = (1 << bits) - 1
    groups = [weight[:, index == group] for group in range(index.max() + 1)]
    if symmetric:
        zeros = np.full((len(weight), len(groups)), 1 << (bits - 1))
        scales = np.stack([abs(group).max(1) / (most // 2) for group in groups], 1)
    else:
        low = np.stack([np.minimum(group.min(1), 0) for group in groups], 1)
        scales = (np.stack([np.maximum(group.max(1), 0) for group in groups], 1) - low) / most
        zeros = np.clip(np.rint(-low / scales), 0, most).astype(np.int64)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.rint(weight / scales[:, index] + zeros[:, index])
    return np.clip(codes, 0, most).astype(np.int64), zeros, scales


def _value(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray) -> Tensor:
    return torch.from_numpy((codes - zeros[:, index]).astype(np.float32) * scales[:, index])


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis into 32-bit words, the first number into the lowest bits."""
    per_word = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint32)
    return sum(parts[..., i] << np.uint32(bits * i) for i in range(per_word)).view(np.int32)  # type: ignore[union-attr]
