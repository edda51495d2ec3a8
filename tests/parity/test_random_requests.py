"""Drafts change no token and no log probability, under every sampling parameter, preemption and aborts."""

import pytest

from tests.parity.random_requests import METHODS, abandon, answer, compare, drafts_of, make_llm, random_requests

COUNT = 14


@pytest.fixture(scope="module")
def reference():
    llm = make_llm()
    requests = random_requests(1, COUNT)
    yield llm, requests, answer(llm, requests)
    llm.close()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_changes(reference, method):
    llm, requests, expected = reference
    drafting = make_llm(METHODS[method])
    abandon(drafting, random_requests(2, 5), 12)
    assert compare(llm, requests, expected, answer(drafting, requests)) > 100
    stats = drafts_of(drafting).stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafting.close()
