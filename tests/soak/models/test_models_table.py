"""The committed table is what every type of the installed transformers gives, and preflight agrees with the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.soak.models.models_page import read_all, try_kinds
from tests.soak.models.preflight_fuzz import FIRST_OF_MORE, FIRST_WITH_DRAFTS, compare
from tests.soak.models.refusals import every_class, refusal, write_config
from tests.soak.models.transformers_models import KINDS
from tokenloom.gpu_worker.checkpoint.module_types import TYPES_FILE

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
    for part in ("divided", "entries", "lengths", "paddings", "rules", "strict", "values"):
        assert found[part] == committed[part], "run `make models-docs`"


@pytest.mark.parametrize("part", range(PARTS))
def test_each_class_of_the_library_is_served_or_refused_in_one_sentence(part: int, tmp_path: Path) -> None:
    refused = 0
    for kind, names in list(every_class().items())[part::PARTS]:
        for name in names:
            try:
                write_config(kind, name, tmp_path)
            except Exception:
                continue  # a configuration that has no defaults
            if reason := refusal(tmp_path):
                refused += 1
                assert "\n" not in reason, (kind, name)
                assert str(tmp_path) in reason, (kind, name)
    assert refused > 50


SEEDS = [
    each
    for first, count in ((0, 300), (FIRST_OF_MORE, 60), (FIRST_WITH_DRAFTS, 40))
    for each in range(first, first + count)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_preflight_and_engine_agree(seed: int, tmp_path: Path) -> None:
    verdict, text = compare(seed, tmp_path)
    assert verdict != "disagreement", text
