"""The mix of requests."""

import random

from benchmarks.chaos.clients.mix import FEATURES, Case, make_cases, with_new_grammar

COUNT = 4 * len(FEATURES)


def test_the_mix_is_a_function_of_the_seed() -> None:
    assert make_cases(random.Random(1), 1000, (5, 9), COUNT) == make_cases(random.Random(1), 1000, (5, 9), COUNT)
    assert make_cases(random.Random(1), 1000, (5, 9), COUNT) != make_cases(random.Random(2), 1000, (5, 9), COUNT)


def test_every_feature_is_streamed_and_unary() -> None:
    cases = make_cases(random.Random(0), 1000, (5, 9), COUNT)
    assert len({case.name for case in cases}) == COUNT
    for feature in FEATURES:
        assert {case.streamed for case in cases if case.name.startswith(feature)} == {True, False}


def test_every_answer_is_determined() -> None:
    for case in make_cases(random.Random(0), 1000, (5, 9), COUNT):
        assert case.options["temperature"] == 0 or "seed" in case.options, case
        assert (case.prompt is None) == case.is_chat


def test_each_request_has_a_schema_of_its_own() -> None:
    schema = Case("", "text", options={"structured_outputs": {"json": {"type": "integer"}}})
    first, second = (with_new_grammar(schema, number).options["structured_outputs"]["json"] for number in (1, 2))
    assert first != second
    assert first["type"] == second["type"] == "integer"
    assert with_new_grammar(Case("", "text"), 1) == Case("", "text")
