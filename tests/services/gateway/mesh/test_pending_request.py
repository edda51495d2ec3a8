"""What is kept of a request, and for how long."""

import pytest

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.pending_request import MAX_LOSSES_ALONE, PendingRequest
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit
from tokenloom.v1.types_pb2 import FinishReason, Prompt, SamplingParams

PROMPT_BYTES = 400


def pending_request(max_kept: int, *, takes_over: bool = False, sought_until: float = 0.0) -> PendingRequest:
    submit = Submit(
        request_id="r",
        tenant="a",
        fingerprint=b"body",
        take_over=takes_over,
        prompt=Prompt(token_ids=range(PROMPT_BYTES // 4)),
        sampling_params=SamplingParams(max_tokens=3),
    )
    budget = RetryBudget(lambda: 0.0)
    return PendingRequest(submit, Collector(1), 0, AdmissionLimit(max_kept), budget, now=0.0, sought_until=sought_until)


def test_a_prompt_within_the_budget_is_kept_to_the_end() -> None:
    kept = AdmissionLimit(PROMPT_BYTES)
    submit = Submit(prompt=Prompt(token_ids=range(100)), num_samples=2)
    held = PendingRequest(submit, Collector(2), 0, kept, RetryBudget(lambda: 0.0), now=0.0)
    held.first(1)
    assert (held.can_begin, kept.taken) == (True, PROMPT_BYTES)
    held.release()
    held.cancel()
    assert (held.can_begin, kept.taken) == (False, 0)


@pytest.mark.parametrize("fingerprint", [b"", b"body"])
def test_how_a_sample_ended_is_sent_again_for_requests_that_can_be_resumed(fingerprint: bytes) -> None:
    collector = Collector(2)
    submit = Submit(prompt=Prompt(token_ids=range(100)), num_samples=2, fingerprint=fingerprint)
    held = PendingRequest(submit, collector, 0, AdmissionLimit(PROMPT_BYTES), RetryBudget(lambda: 0.0), now=0.0)
    collector.put(0, "x", 0, [1])
    collector.finish(0, RequestFinished(reason=FinishReason.FINISH_REASON_LENGTH, completion_tokens=1))
    (journal,) = held.again(1, now=0.0).journals
    assert (journal.finished, journal.HasField("end")) == (True, bool(fingerprint))


def test_a_prompt_beyond_the_budget_is_forgotten_once_it_was_sent() -> None:
    sent = pending_request(0)
    assert len(sent.first(1).prompt.token_ids) == 100
    assert not sent.can_begin


def test_a_resumed_request_needs_no_prompt_beyond_the_budget() -> None:
    """It was kept until the answer ended, so any number of them went past the budget."""
    resumed = pending_request(0, sought_until=3.0)
    for slot in (1, 2):
        resume = resumed.resume(slot)
        assert (resume.slot, resume.request_id, resume.tenant, resume.fingerprint) == (slot, "r", "a", b"body")
    assert not resumed.can_begin
    assert resumed.is_sought, "another output processor may have it"


def test_a_repeated_request_keeps_its_prompt_until_the_search_is_over() -> None:
    repeated = pending_request(0, takes_over=True, sought_until=3.0)
    repeated.resume(1)
    assert repeated.can_begin, "it begins anew if no output processor has it"
    repeated.settle()
    assert not repeated.can_begin


@pytest.mark.parametrize("ends_search", [PendingRequest.lost, PendingRequest.moved])
def test_a_request_that_waits_for_another_output_processor_has_its_prompt(ends_search: object) -> None:
    repeated = pending_request(0, takes_over=True, sought_until=3.0)
    repeated.resume(1)
    repeated.unknown_to.append("first stream")
    if ends_search is PendingRequest.lost:
        repeated.lost(Cause.GONE)
    else:
        repeated.moved("second stream", Cause.GONE, errors.TryElsewhere("leaving"))
        assert repeated.refused_by == ["second stream"]
    repeated.settle()
    assert (repeated.can_begin, repeated.is_accepted, repeated.unknown_to) == (True, True, [])


def test_output_processors_whose_connections_broke_were_not_ended_by_a_request() -> None:
    alone = pending_request(PROMPT_BYTES)
    for moment in range(2 * MAX_LOSSES_ALONE):
        lost, other = ("a", 1), ("b", 1)
        if moment % 2:
            lost, other = other, lost
        alone.lost(Cause.GONE, ended_alone=lost, connected=[other])
    assert not alone.collector.failed


def test_output_processors_that_are_restarted_again_and_again_end_the_request_that_was_alone_there() -> None:
    alone = pending_request(PROMPT_BYTES)
    for epoch in range(MAX_LOSSES_ALONE):
        assert not alone.collector.failed
        alone.lost(Cause.GONE, ended_alone=("a", epoch), connected=[("b", 1)])
    assert alone.collector.failed
