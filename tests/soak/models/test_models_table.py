"""The committed table is what every type of the installed transformers gives, and preflight agrees with the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.soak.models.models_page import read_all, try_kinds
from tests.soak.models.preflight_fuzz import compare
from tests.soak.models.transformers_models import KINDS
from tokenloom.gpu_worker.checkpoint.served_how import TYPES_FILE

PARTS = 8
"""Of the types; to try one takes seconds."""


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TYPES_FILE.read_text())[transformers.__version__]
    return table


def test_the_table_has_every_type(committed: dict[str, Any]) -> None:
    assert committed["types"].keys() == KINDS.keys(), "run `make models-docs`"


@pytest.mark.parametrize("part", range(PARTS))
def test_the_table_is_what_is_found(part: int, committed: dict[str, Any], tmp_path: Path) -> None:
    kinds = [*KINDS][part::PARTS]
    found = json.loads(json.dumps(try_kinds(kinds, tmp_path)))
    for part in ("types", "unless", "states"):
        of_kinds = {kind: value for kind, value in committed[part].items() if kind in kinds}
        assert found[part] == of_kinds, "run `make models-docs`"
    assert found["staged"] == [kind for kind in committed["staged"] if kind in kinds], "run `make models-docs`"


def test_the_table_is_what_is_read(committed: dict[str, Any]) -> None:
    found = json.loads(json.dumps(read_all({kind: reason for kind, (_, reason) in committed["types"].items()})))
    for part in ("divided", "lengths", "values", "entries"):
        assert found[part] == committed[part], "run `make models-docs`"


@pytest.mark.parametrize("seed", range(300))
def test_preflight_and_engine_agree(seed: int, tmp_path: Path) -> None:
    verdict, text = compare(seed, tmp_path)
    assert verdict != "disagreement", text
