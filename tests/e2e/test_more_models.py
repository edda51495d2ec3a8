"""Prefill and decode on two engines of a mesh give the tokens of transformers, whatever architecture they serve."""

from pathlib import Path

import pytest
import torch

from tests.mesh.served_parity import check_served_model
from tests.parity.reference import LIBRARY_MODELS, MORE_MODELS


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


IN_MESH_TESTS = ["gemma3_text"]


@pytest.mark.parametrize("name", [name for name in MORE_MODELS + LIBRARY_MODELS if name not in IN_MESH_TESTS])
async def test_tokens_are_those_of_transformers(name: str, socket_dir: Path, tmp_path: Path) -> None:
    await check_served_model(name, socket_dir, tmp_path)
