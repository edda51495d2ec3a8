"""One model through the mesh of real services; ``tests/e2e/test_more_models.py`` has the other architectures."""

from pathlib import Path

import torch

from tests.mesh.served_parity import check_served_model


async def test_gemma_3_with_mixed_windows(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    await check_served_model("gemma3_text", socket_dir, tmp_path)
