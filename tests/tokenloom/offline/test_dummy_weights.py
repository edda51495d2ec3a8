"""A model without files of weights: its tokens mean nothing, and are the same in every engine."""

import shutil
from pathlib import Path

import pytest
import torch

from tokenloom import LLM, SamplingParams
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.preflight.model import check_checkpoint
from tokenloom.preflight.small_files import CannotServe


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """The demo model without its weights; the layer that pools keeps its own."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("draft", "eagle")))
    (path / "model.safetensors").unlink()
    return path


def test_a_model_of_random_weights_generates(described: Path) -> None:
    torch.set_num_threads(1)
    params, found = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), []
    for _ in range(2):
        llm = LLM(str(described), load_format="dummy", max_model_len=64, num_kv_blocks=16)
        try:
            found.append(list(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids))
        finally:
            llm.close()
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_serve_misses_the_files_only_without_it(described: Path) -> None:
    check_checkpoint(described, EngineConfig(worker=WorkerConfig(load_format="dummy")))
    with pytest.raises(CannotServe, match=r"has config\.json but no weights"):
        check_checkpoint(described)
