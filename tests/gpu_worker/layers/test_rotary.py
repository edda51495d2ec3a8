"""Rope frequencies and rotations against transformers."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tokenloom.gpu_worker.checkpoint.files.config_reader import ConfigReader
from tokenloom.gpu_worker.checkpoint.rope_config import RopeConfig, no_rotation, read_rope, with_context
from tokenloom.gpu_worker.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate, rotation

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama3 of a short context": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": YARN | {"original_max_position_embeddings": 4096},
    "yarn, context from the model": YARN,
    "yarn, own ramp": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, own attention factor": YARN | {"attention_factor": 1.7},
    "yarn, magnitudes": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, no stretch": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("head_size", [64, 20])
def test_cosines_and_sines_equal_transformers(name: str, head_size: int) -> None:
    parameters = PARAMETERS[name]
    hf_config = transformers.LlamaConfig(
        head_dim=head_size, max_position_embeddings=16384, rope_parameters=dict(parameters)
    )
    reference = LlamaRotaryEmbedding(hf_config)
    config = read_rope(ConfigReader({"rope_parameters": parameters}, "config.json"), head_size, 16384)
    positions = torch.tensor([0, 1, 2, 77, 4095, 4096, 16383])
    cos, sin = RotaryEmbedding(config, torch.device("cpu"), rotation)(positions)
    expected_cos, expected_sin = reference(torch.zeros(1), positions[None])
    torch.testing.assert_close(inverse_frequencies(config), reference.inv_freq, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat((cos, cos), -1)[:, 0], expected_cos[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat((sin, sin), -1)[:, 0], expected_sin[0], rtol=0, atol=0)


@pytest.mark.parametrize("entries", [{}, {"factor": 8.0}, {"attention_factor": 1.25}, {"type": "su"}])
@pytest.mark.parametrize("max_model_len", [4096, 16384])
def test_long_rope_equals_transformers(entries: dict[str, Any], max_model_len: int) -> None:
    factors = {"short_factor": [1.0 + i / 64 for i in range(16)], "long_factor": [1.5**i for i in range(16)]}
    parameters = {"type": "longrope", "rope_theta": 1e4, **factors, **entries}
    hf_parameters = parameters | {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    hf_config = transformers.LlamaConfig(head_dim=32, max_position_embeddings=16384, rope_parameters=hf_parameters)
    outer = {"rope_scaling": parameters, "original_max_position_embeddings": 4096}
    config = with_context(read_rope(ConfigReader(outer, "config.json"), 32, 16384), max_model_len)
    positions = torch.tensor([0, 1, 77, 4095, max_model_len - 1])  # the last one chooses transformers' factors
    cos, sin = RotaryEmbedding(config, torch.device("cpu"), rotation)(positions)
    expected_cos, expected_sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(torch.cat((cos, cos), -1)[:, 0], expected_cos[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat((sin, sin), -1)[:, 0], expected_sin[0], rtol=0, atol=0)


@pytest.mark.parametrize("max_model_len", [1, 4096, 4097, 6000, 16384, 99999])
def test_dynamic_rope_is_that_of_a_sequence_of_the_longest_length(max_model_len: int) -> None:
    """_compute_dynamic_ntk_parameters of transformers/modeling_rope_utils.py; the factor ends at 16,384 tokens."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    hf_config = transformers.LlamaConfig(head_dim=32, max_position_embeddings=4096, rope_parameters=dict(parameters))
    config = with_context(read_rope(ConfigReader({"rope_parameters": parameters}, "c"), 32, 4096), max_model_len)
    longest = min(max_model_len, 16384)
    positions = torch.tensor([0, 1, 77, longest - 1])  # the last one chooses transformers' frequencies
    cos, sin = RotaryEmbedding(config, torch.device("cpu"), rotation)(positions)
    expected_cos, expected_sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(torch.cat((cos, cos), -1)[:, 0], expected_cos[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(torch.cat((sin, sin), -1)[:, 0], expected_sin[0], rtol=0, atol=2e-3)
    assert config.is_stretched == (max_model_len > 4096)


def test_without_rotation_heads_stay_as_they_are() -> None:
    cos, sin = RotaryEmbedding(no_rotation(8), torch.device("cpu"), rotation)(torch.tensor([0, 5, 100_000]))
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rotate(heads, cos, sin), heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 3, 16, generator=generator).to(dtype)
    cos, sin = RotaryEmbedding(RopeConfig(16), torch.device("cpu"), rotation)(torch.arange(5) * 9)
    wide_cos, wide_sin = (torch.cat((x, x), -1)[:, 0].to(dtype) for x in (cos, sin))
    expected, _ = apply_rotary_pos_emb(heads, heads, wide_cos, wide_sin)
    assert torch.equal(rotate(heads, cos, sin), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 2.0},
                "original_max_position_embeddings": 50,
            },
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}},
        ),
        ({}, {"rope_parameters": {"rope_theta": 10000.0}}),
    ],
)
def test_both_spellings_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    readers = [ConfigReader(values, "config.json") for values in (old, new)]
    first, second = (read_rope(reader, 64, 4096) for reader in readers)
    assert first == second
    for reader in readers:
        reader.refuse_rest()


@pytest.mark.parametrize("axes", [(0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 0)])
def test_pairs_turn_by_their_own_axis(axes: tuple[int, ...]) -> None:
    """And a token whose positions are equal has the bits of one position, in tensors that kernels can read."""
    embedding = RotaryEmbedding(RopeConfig(16), torch.device("cpu"), rotation, axes=axes)
    plain = RotaryEmbedding(RopeConfig(16), torch.device("cpu"), rotation)
    positions = torch.tensor([[5, 7, 9], [5, 70, 90], [5, 700, 900]])
    found = embedding(positions)
    for part, expected in zip(found, zip(*map(plain, positions), strict=True), strict=True):
        assert part.is_contiguous()
        assert torch.equal(part[0], expected[0][0])
        for pair, axis in enumerate(axes):
            assert torch.equal(part[..., pair], expected[axis][..., pair])
    for part, expected in zip(plain(positions), plain(positions[0]), strict=True):
        assert torch.equal(part, expected)  # without axes the first position turns all
