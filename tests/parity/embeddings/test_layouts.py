"""The vectors of published layouts are those that sentence-transformers computes of the same files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.parity.embeddings.layouts import LAYOUTS, TEXTS
from tests.parity.embeddings.record import VECTORS, digest
from tokenloom import LLM, PoolingParams

RECORDED = json.loads(VECTORS.read_text())


def skip_if_empty(text: str, name: str) -> bool:
    """Return whether a text has no tokens, which requests must have: a static table puts nothing around it."""
    return name == "static" and not text.strip()


@pytest.mark.parametrize("name", LAYOUTS)
def test_vectors_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    layout.save(tmp_path)
    assert digest(tmp_path) == RECORDED[name]["files"], "the files are others than those of the record"
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=40)
    length = PoolingParams(use_activation=True)
    for prompt_name, vectors in RECORDED[name]["vectors"].items():
        pairs = [pair for pair in zip(TEXTS, vectors, strict=True) if not skip_if_empty(pair[0], name)]
        texts, expected = zip(*pairs, strict=True)
        outputs = llm.embed(list(texts), prompt_name=prompt_name or None, use_tqdm=False, pooling_params=length)
        found = np.array([output.outputs.embedding for output in outputs])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=prompt_name)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].model])
def test_transformers_reads_the_files(name: str, tmp_path: Path) -> None:
    """Files that only their writer could read would show nothing."""
    LAYOUTS[name].save(tmp_path)
    model, report = getattr(transformers, LAYOUTS[name].model).from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.hidden_size == 32
