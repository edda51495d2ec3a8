"""Drafts change no token and no log probability, under every sampling parameter, preemption and aborts."""

import pytest

from tests.parity.speculation import METHODS, abandon, answer, compare, drafts_of, make_llm, random_requests
from tests.parity.test_async_scheduling import Followed, token_ids

COUNT = 14


@pytest.fixture(scope="module")
def reference():
    llm = make_llm()
    requests = random_requests(1, COUNT)
    yield llm, requests, answer(llm, requests)
    llm.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_changes(reference, method, overlaps):
    llm, requests, expected = reference
    drafting = make_llm(METHODS[method], async_scheduling=overlaps)
    assert drafts_of(drafting).defers == overlaps
    abandon(drafting, random_requests(2, 5), 12)
    assert compare(llm, requests, expected, answer(drafting, requests)) > 100
    stats = drafts_of(drafting).stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafting.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_sessions(reference, overlaps):
    drafting = make_llm(METHODS["ngram"], async_scheduling=overlaps)
    runs = []
    for llm in (drafting, reference[0]):
        run = Followed(llm)
        first, *others = (token_ids(llm, index) for index in (1, 2, 5))
        run.add("session", first, resumable=True, temperature=0.0)
        run.add("other", token_ids(llm, 3), 30)
        for prompt in others:
            run.step(3)
            run.add("session", prompt, resumable=prompt is not others[-1], temperature=0.0)
        runs.append(run.finish())
    assert (runs[0].tokens, runs[0].ends) == (runs[1].tokens, runs[1].ends)
    assert drafts_of(drafting).stats().num_accepted_tokens
    drafting.close()
