"""``docs/reference/models.md`` is current."""

import re

from tests.gpu_worker.models.transformers.test_model_types import IDENTICAL
from tests.soak.models.models_page import PAGE, native_part, sweep_part
from tests.soak.models.transformers_models import KINDS, Outcome


def test_the_built_in_architectures_are_those_of_the_code() -> None:
    assert PAGE.read_text().startswith(native_part()), "run `python -m tests.soak.models.models_page --native-only`"


def test_the_page_has_the_types_that_the_tests_serve() -> None:
    text = PAGE.read_text()
    assert "WRONG" not in text
    for kind in IDENTICAL:
        assert f"| {KINDS[kind]} | {kind} | yes |  |" in text


def test_the_page_counts_what_it_lists() -> None:
    text = PAGE.read_text()
    counts = re.search(r"(\d+) types served, (\d+) refused", text)
    assert counts is not None
    assert [text.count("| yes |"), text.count("| refused |")] == [int(count) for count in counts.groups()]
    assert int(counts[1]) >= 55


def test_a_page_of_two_outcomes() -> None:
    reason = "/tmp/x/config.json: BloomForCausalLM is not supported: it builds a mask | of its own"
    page = sweep_part({"phi": Outcome("identical"), "bloom": Outcome("refused", reason)})
    assert "1 types served, 1 refused" in page
    assert "| BloomForCausalLM | bloom | refused | it builds a mask / of its own |" in page
