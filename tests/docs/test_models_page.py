"""``docs/reference/models.md`` is written from the table of what was run."""

import json
import re

import transformers

from tests.soak.models.models_page import PAGE, RELEASES_FILE, page, reason_of, strict_sections, written
from tests.soak.models.releases import BY_CLASS, OF_VISION, RELEASES
from tests.soak.models.transformers_models import KINDS, Outcome
from tokenloom.gpu_worker.checkpoint.files.architectures import ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.module_types import TYPES_FILE, UNTRIED

TABLE = json.loads(TYPES_FILE.read_text())
ROWS = json.loads(RELEASES_FILE.read_text())["releases"]


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(TABLE, ROWS), "run `python -m tests.soak.models.models_page --page-only`"


def test_the_table_has_every_type_of_the_installed_version() -> None:
    found = TABLE[transformers.__version__]
    assert {kind: name for kind, (name, _) in found["types"].items()} == KINDS, "run `make models-docs`"
    assert TYPES_FILE.read_text() == written(TABLE)
    strict = strict_sections({kind: answer for kind, (_, answer) in found["types"].items()})
    assert {name: found[name] for name in strict} == strict
    assert set(found["entries"]) == {kind for kind, name in KINDS.items() if name in ARCHITECTURES}


def test_the_page_has_every_release() -> None:
    assert list(ROWS) == [*RELEASES, *OF_VISION, *BY_CLASS], (
        "run `python -m tests.soak.models.models_page --releases-only`"
    )


def test_the_page_counts_what_it_lists() -> None:
    text = PAGE.read_text()
    counts = re.search(r"(\d+) types served, (\d+) refused", text)
    assert counts is not None
    sweep = text.partition("## Computed by transformers")[2]
    assert [sweep.count("| yes |"), sweep.count("| refused |")] == [int(count) for count in counts.groups()]


def test_a_page_of_two_types() -> None:
    refusal = Outcome("refused", "/tmp/x/config.json: BloomForCausalLM is not supported: it builds a mask | of its own")
    types = {
        "phi": ["PhiForCausalLM", reason_of(Outcome("identical"))],
        "bloom": ["BloomForCausalLM", reason_of(refusal)],
        "zamba": ["ZambaForCausalLM", reason_of(Outcome("no reference", "ImportError"))],
    }
    table = {"torch": "2.0", "types": types, "unless": {"phi": [["odd", True, "looks ahead"]]}, "entries": {}}
    text = page({"5.0": table}, {"a/b": ["", "x | y"], "a/c": ["built in", "z"]})
    assert types["zamba"][1] == UNTRIED
    assert "| a/b | refused | x / y |\n| a/c | built in | z |\n" in text
    assert "transformers 5.0, PyTorch 2.0: 1 types served, 1 refused." in text
    assert "| BloomForCausalLM | bloom | refused | builds a mask / of its own |" in text
    assert "| PhiForCausalLM | phi | yes | odd = true: looks ahead |" in text
    assert "| ZambaForCausalLM | zamba | untried |  |" in text
    assert json.loads(written({"5.0": table})) == {"5.0": table}
