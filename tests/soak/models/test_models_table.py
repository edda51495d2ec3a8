"""The committed table is what every type of the installed transformers gives, and preflight agrees with the engine."""

import json
from pathlib import Path

import pytest
import transformers

from tests.soak.models.models_page import try_all
from tests.soak.models.preflight_fuzz import compare
from tokenloom.gpu_worker.checkpoint.served_how import TYPES_FILE


def test_the_table_is_what_is_found(tmp_path: Path) -> None:
    committed = json.loads(TYPES_FILE.read_text())[transformers.__version__]
    found = json.loads(json.dumps(try_all(tmp_path)))
    for part in ("types", "unless", "states", "staged", "divided", "lengths", "values", "entries"):
        assert found[part] == committed[part], "run `make models-docs`"


@pytest.mark.parametrize("seed", range(300))
def test_preflight_and_engine_agree(seed: int, tmp_path: Path) -> None:
    verdict, text = compare(seed, tmp_path)
    assert verdict != "disagreement", text
