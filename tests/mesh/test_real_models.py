"""Models through the mesh of real services; ``tests/e2e/test_more_models.py`` has the other architectures."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.mesh.asking import ask
from tests.mesh.served_parity import (
    ENGINE,
    FEW_BLOCKS,
    FEW_BLOCKS_OF_GROUPS,
    LONGEST,
    ask_and_kill,
    check_fail_over,
    check_served_model,
    check_served_reference,
)
from tests.mesh.split import SplitMesh
from tests.parity.reference import (
    SMALL_CONFIGS,
    Reference,
    add_demo_tokenizer,
    compute_case,
    make_gpt_oss_reference,
    save_random,
    small_prompts,
)
from tests.parity.state_checkpoints import make_model


async def test_gemma_3_with_mixed_windows(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    await check_served_model("gemma3_text", socket_dir, tmp_path)


async def test_gpt_oss_with_experts_of_4_bits(socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = await asyncio.to_thread(make_gpt_oss_reference, tmp_path, LONGEST, sliding_window=50)
    await check_served_reference(reference, socket_dir, num_blocks=FEW_BLOCKS_OF_GROUPS)


async def test_a_batch_invariant_answer_whose_engine_is_killed_has_the_bits_of_another(
    socket_dir: Path, tmp_path: Path
) -> None:
    """Prompt and first tokens on other engines than the rest, beside other requests."""
    torch.set_num_threads(1)
    path = await asyncio.to_thread(save_random, "llama", tmp_path, **SMALL_CONFIGS["llama"])
    engine = {**ENGINE, "model": str(add_demo_tokenizer(path)), "dtype": "float32"}
    split = SplitMesh(socket_dir, ("prefill", "decode", "decode"), engine={**engine, "batch_invariant": True})
    prompt, others = list(range(7, 87)), [[*range(7, 60), number] for number in range(3)]
    async with split.running() as mesh, mesh.http() as http:
        alone = await ask(http, prompt, 24, logprobs=2)
        moved, *_ = await asyncio.gather(
            ask_and_kill(mesh, http, prompt, 24, logprobs=2), *(ask(http, other, 3) for other in others)
        )
        assert len(alone.logprobs) == 24
        assert (moved.token_ids, moved.logprobs) == (alone.token_ids, alone.logprobs)
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
async def test_a_state_that_moves_and_is_lost(kind: str, socket_dir: Path, tmp_path: Path) -> None:
    """From the engine that computes prompts to one that decodes and preempts, and to another when that is killed."""
    torch.set_num_threads(1)

    def make() -> Reference:
        model = make_model(kind, vocab_size=503)
        model.save_pretrained(tmp_path)
        return Reference(tmp_path, (), [compute_case(model, prompt) for prompt in small_prompts(503, LONGEST)])

    reference = await asyncio.to_thread(make)
    await check_served_reference(reference, socket_dir, num_blocks=FEW_BLOCKS, dtype="float32")
    await check_fail_over(reference, socket_dir, dtype="float32")
