"""Prefill and decode on two engines of a mesh give the tokens of transformers, whatever architecture they serve."""

from pathlib import Path

import pytest
import torch

from tests.mesh.served_parity import FEW_BLOCKS, LONGEST, check_fail_over, check_served_model, check_served_reference
from tests.parity.reference import LIBRARY_MODELS, MORE_MODELS
from tests.parity.vision_checkpoints import make_vision_reference


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


IN_MESH_TESTS = ["gemma3_text"]


@pytest.mark.parametrize("name", [name for name in MORE_MODELS + LIBRARY_MODELS if name not in IN_MESH_TESTS])
async def test_tokens_are_those_of_transformers(name: str, socket_dir: Path, tmp_path: Path) -> None:
    await check_served_model(name, socket_dir, tmp_path)


# Blocks of the engine that decodes: the more groups of layers a model has, the more a request takes.
@pytest.mark.parametrize(
    ("kind", "num_blocks"),
    [("qwen3_vl", FEW_BLOCKS), ("gemma4_26b_a4b", 24), ("gemma4_e2b", 24), ("gemma4_e4b", 24), ("muse_glimmer", 31)],
)
async def test_so_are_those_of_the_text_of_a_model_that_reads_images(
    kind: str, num_blocks: int, socket_dir: Path, tmp_path: Path
) -> None:
    reference = make_vision_reference(kind, tmp_path, LONGEST)
    await check_served_reference(reference, socket_dir, num_blocks=num_blocks, language_model_only=True)


@pytest.mark.parametrize("kind", ["gemma4_e2b", "gemma4_e4b"])
async def test_another_engine_goes_on_where_layers_share_kv(kind: str, socket_dir: Path, tmp_path: Path) -> None:
    reference = make_vision_reference(kind, tmp_path, LONGEST)
    await check_fail_over(reference, socket_dir, language_model_only=True)
