"""Random requests over HTTP and through ``LLM`` have the same texts, ids, reasons and log probabilities.

Here are few of them; ``tests/parity/test_offline_requests.py`` sends a thousand.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.mesh.offline_requests import both, compared, draw
from tokenloom import LLM

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["auto", "deepseek_r1"])
def parser(request: Any) -> Any:
    """How the model writes reasoning: not at all, or always."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(mesh_dir: Path, parser: str) -> AsyncIterator[tuple[httpx.AsyncClient, LLM]]:
    async with both(mesh_dir, parser) as engines:
        yield engines


async def test_requests_that_run_together(engines: tuple[httpx.AsyncClient, LLM], parser: str) -> None:
    asked = [draw(seed, reasons=parser != "auto") for seed in range(35)]
    assert await compared(*engines, asked, 1e-4) == {}


async def test_log_probabilities_of_requests_that_run_alone_are_the_same_numbers(
    engines: tuple[httpx.AsyncClient, LLM], parser: str
) -> None:
    asked = [draw(seed, reasons=parser != "auto") for seed in range(1000, 1012)]
    for each in asked:
        each.fields.update(logprobs=2, skip_reading_prefix_cache=True, n=1)
    assert await compared(*engines, asked, 0.0, at_once=1) == {}


async def test_log_probabilities_of_batch_invariant_engines_are_the_same_numbers(socket_dir: Path) -> None:
    """Though requests run together, in other batches and chunks on both sides, and find other prefixes in the cache."""
    asked = [draw(seed) for seed in range(4000, 4030)]
    for each in asked:
        each.fields.update(logprobs=2)
    async with both(socket_dir, "auto", batch_invariant=True) as engines:
        assert await compared(*engines, asked, 0.0) == {}
