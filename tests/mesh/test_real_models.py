"""Two models through the mesh of real services; ``tests/e2e/test_more_models.py`` has the other architectures."""

import asyncio
from pathlib import Path

import torch

from tests.mesh.served_parity import FEW_BLOCKS_OF_GROUPS, LONGEST, check_served_model, check_served_reference
from tests.parity.reference import make_gpt_oss_reference


async def test_gemma_3_with_mixed_windows(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    await check_served_model("gemma3_text", socket_dir, tmp_path)


async def test_gpt_oss_with_experts_of_4_bits(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = await asyncio.to_thread(make_gpt_oss_reference, tmp_path, LONGEST, sliding_window=50)
    await check_served_reference(reference, socket_dir, num_blocks=FEW_BLOCKS_OF_GROUPS)
