"""A thousand random requests have the same texts, ids, reasons and log probabilities over HTTP and through ``LLM``."""

from pathlib import Path

import pytest

from tests.mesh.offline_requests import both, compared, draw


@pytest.mark.parametrize("parser", ["auto", "deepseek_r1"])
async def test_random_requests(socket_dir: Path, parser: str) -> None:
    asked = [draw(seed, reasons=parser != "auto") for seed in range(2000, 2500)]
    async with both(socket_dir, parser) as engines:
        assert await compared(*engines, asked, 1e-4) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_requests_of_batch_invariant_engines(socket_dir: Path, dtype: str) -> None:
    """Whose log probabilities are the same numbers, though the two have other requests beside each."""
    asked = [draw(seed) for seed in range(3000, 3500)]
    for each in asked:
        each.fields.setdefault("logprobs", 2)
    options = {"batch_invariant": True, "dtype": dtype, "kv_cache_dtype": "int8" if dtype == "bfloat16" else "auto"}
    async with both(socket_dir, "auto", **options) as engines:
        assert await compared(*engines, asked, 0.0) == {}
