"""Models of attention alone, in bfloat16 with ``--batch-invariant``: a prefix cache, chunks and other requests change
no bit of an answer, as for models that keep a state."""

from pathlib import Path

import pytest
import torch

from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tests.parity.test_exact_states import conversations


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_cache_changes_no_bit(kind: str, num_threads: int, tmp_path: Path) -> None:
    path = save_random(kind, tmp_path, torch.bfloat16, max_position_embeddings=4096, vocab_size=512)

    def engine(**more: object) -> Engine:
        settings = {"num_blocks": 2048, "max_model_len": 2048, "num_threads": num_threads, "batch_invariant": True}
        return Engine(path, dtype="bfloat16", **{**settings, **more})  # type: ignore[arg-type]

    before = torch.get_num_threads()
    warm = engine(prefix_caching=True, budget=160, max_num_seqs=7)
    pairs = conversations(engine(prefix_caching=False, max_num_seqs=12), warm, [])
    torch.set_num_threads(before)
    assert sum(one == other for one, other in pairs) == len(pairs)
