"""Schemas as libraries write them: most are accepted, some are relaxed, and only what admits nothing is refused."""

import json

import pytest

from tests.tokenloom.request.schema_pool.pool_page import DOCUMENT, Fate, fates, page, pool
from tokenloom.request.json_schema import fitted
from tokenloom.request.output_constraints import MAX_SOURCE_BYTES


@pytest.fixture(scope="module")
def found() -> list[Fate]:
    return fates()


def test_the_page_says_what_becomes_of_them(found: list[Fate]) -> None:
    assert DOCUMENT.read_text() == page(found), "run python -m tests.tokenloom.request.schema_pool.pool_page"


def test_only_what_admits_no_document_is_refused(found: list[Fate]) -> None:
    assert len(found) >= 200
    assert {each.name for each in found if each.refusal} == {"contradiction"}


def test_no_refusal_quotes_a_grammar(found: list[Fate]) -> None:
    assert all("^" not in each.refusal and "start:" not in each.refusal for each in found)


def test_each_is_within_the_bound_and_fits_once_and_for_all() -> None:
    for entry in pool():
        source = json.dumps(entry["schema"])
        assert len(source) <= MAX_SOURCE_BYTES
        once, _ = fitted(source)
        assert fitted(once) == (once, []), entry["name"]


@pytest.mark.parametrize("name", ["uuid4", "bytes", "file_path", "record", "secret"])
def test_what_clients_complained_of_is_accepted_whole(found: list[Fate], name: str) -> None:
    (fate,) = [each for each in found if each.name == name]
    assert fate.kind == "accepted"
