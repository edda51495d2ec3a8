"""Encoders that are built in: entries that are refused by name, and positions of padding inside a text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.pooling.small_models import make_checkpoint
from tokenloom.gpu_worker.checkpoint.encoder_config import read_encoder_config
from tokenloom.gpu_worker.encoders.encoder import load_encoder


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        ("BertModel", {"is_decoder": True}, "is_decoder must be false"),
        ("XLMRobertaModel", {"pad_token_id": None}, "pad_token_id must be a token's number"),
        ("XLMRobertaModel", {"pad_token_id": -1}, "pad_token_id must be a token's number"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types must name sliding_attention or"),
        ("ModernBertModel", {"sliding_window": False}, "sliding_window must be a positive integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    architecture: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, architecture)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(ValueError, match=message):
        read_encoder_config(tmp_path)


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel"])
@torch.inference_mode()
def test_padding_inside_a_text_has_the_positions_of_transformers(architecture: str, tmp_path: Path) -> None:
    """create_position_ids_from_input_ids of models/roberta/modeling_roberta.py counts no token of padding."""
    reference = make_checkpoint(tmp_path, architecture)
    prompts = [[7, 1, 9, 0, 1, 1, 12], [5, 6], [1, 1, 8]]
    ids, begins = torch.tensor([token for prompt in prompts for token in prompt]), [0, 7, 9, 12]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    found = load_encoder(tmp_path, "float32").forward(ids, positions, torch.zeros_like(ids), begins)
    expected = [reference(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)
