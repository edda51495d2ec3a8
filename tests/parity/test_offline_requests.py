"""A thousand random requests have the same texts, ids, reasons and log probabilities over HTTP and through ``LLM``."""

from pathlib import Path

import pytest

from tests.mesh.offline_requests import both, compared, draw


@pytest.mark.parametrize("parser", ["auto", "deepseek_r1"])
async def test_random_requests(socket_dir: Path, parser: str) -> None:
    asked = [draw(seed, reasons=parser != "auto") for seed in range(2000, 2500)]
    async with both(socket_dir, parser) as engines:
        assert await compared(*engines, asked, 1e-4) == {}
