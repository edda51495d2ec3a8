"""What a request takes of its tenant's and the gateway's limits is given back once, on every path."""

import pytest

from tokenloom.request.errors import InvalidArgument, RateLimitExceeded, ResourceExhausted, Unavailable
from tokenloom.services.gateway.generation.admission import RequestAdmission, WaitEstimator
from tokenloom.services.gateway.mesh.mesh_view import Capacity
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import TenantShare, TenantShares
from tokenloom.v1.types_pb2 import SamplingParams, StructuredOutputs

LIMITS = TenantLimits(live_outputs=4, pending_grammars=1, tokens_per_second=10, token_burst=100)


class Gate:
    """An admission with everything that it counts."""

    def __init__(self) -> None:
        self.estimator = WaitEstimator(10.0, always_queued=0)
        self.shares = TenantShares(
            LIMITS, is_shared=False, max_live=6, max_sessions=1, max_message_bytes=99, clock=lambda: 0.0
        )
        self.admission = RequestAdmission(self.shares, self.estimator)

    @property
    def share(self) -> TenantShare:
        return self.shares.of(NO_TENANT)

    @property
    def counts(self) -> tuple[int, ...]:
        estimator, share = self.estimator, self.share
        tokens = 0 if share.bucket is None else 100 - round(share.bucket.level)
        places = self.shares.outputs.taken, share.live_outputs, share.pending_outputs, share.pending_grammars
        return (*places, estimator.live, estimator.pending, estimator.pending_tokens, tokens)


NOTHING = (0,) * 8


def generate_request(num_prompts: int = 1, num_samples: int = 1, grammar: str = "") -> GenerateRequest:
    sampling = SamplingParams(structured_outputs=StructuredOutputs(regex=grammar) if grammar else None)
    return GenerateRequest(["text"] * num_prompts, "prompt", sampling, tenant=NO_TENANT, num_samples=num_samples)


async def test_pooling_calls_are_counted_apart() -> None:
    gate = Gate()
    place = gate.admission.admit(generate_request(4), 60.0, most_at_once=2)
    assert (gate.estimator.live, gate.estimator.pooled) == (2, 2)
    assert not place.is_beside_answers
    answer = gate.admission.admit(generate_request(), 60.0)
    assert place.is_beside_answers
    answer.close()
    place.close()
    assert (gate.estimator.live, gate.estimator.pooled) == (0, 0)


async def test_a_place_holds_all_and_gives_it_back_once() -> None:
    gate = Gate()
    place = gate.admission.admit(generate_request(2, 2, "a"), 60.0)
    place.take_tokens(30, 40)
    assert gate.counts == (4, 4, 4, 1, 4, 4, 30, 70)
    for _ in range(2):  # a call that resumes the request gets its first tokens again
        place.begin_output(0)
        assert gate.counts == (4, 4, 3, 0, 4, 3, 23, 70)
    place.num_used = 35
    for _ in range(2):
        place.close()
        assert gate.counts == (0, 0, 0, 0, 0, 0, 0, 35)
    assert gate.share.tokens == 35


async def test_a_refused_request_leaves_nothing() -> None:
    gate = Gate()
    with pytest.raises(InvalidArgument, match="5 outputs"):
        gate.admission.admit(generate_request(5), 60.0)
    with gate.admission.admit(generate_request(grammar="a"), 60.0):
        before = gate.counts
        with pytest.raises(RateLimitExceeded, match="pending_grammars"):
            gate.admission.admit(generate_request(grammar="b"), 60.0)
        with pytest.raises(RateLimitExceeded, match="live_outputs"):
            gate.admission.admit(generate_request(4), 60.0)
        gate.estimator.observe(Capacity(seats=1, starts_per_second=0.01))
        with pytest.raises(ResourceExhausted, match="would wait"):
            gate.admission.admit(generate_request(), 60.0)
        assert gate.counts == before
    assert gate.counts == NOTHING
    await gate.admission.drain()
    with pytest.raises(Unavailable):
        gate.admission.admit(generate_request(), 60.0)
    with pytest.raises(Unavailable):
        gate.admission.check_open()
    assert gate.counts == NOTHING


async def test_what_a_lost_gateway_had_accepted_is_not_refused_as_overload() -> None:
    """A stream that had begun ended with resource_exhausted when the next gateway continued it on a busy mesh."""
    gate = Gate()
    gate.estimator.observe(Capacity(seats=1, starts_per_second=0.01))
    with gate.admission.admit(generate_request(), 60.0):
        with pytest.raises(ResourceExhausted):
            gate.admission.admit(generate_request(), 60.0)
        with gate.admission.admit(generate_request(), 60.0, was_accepted=True):
            assert gate.estimator.pending == 2


async def test_requests_that_are_refused_share_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.estimator.observe(Capacity(seats=1, starts_per_second=0.01))
    with gate.admission.admit(generate_request(), 60.0):
        for _ in range(100):
            with pytest.raises(ResourceExhausted):
                gate.admission.admit(generate_request(), 60.0)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("requests refused since the last such line: 1; ")


async def test_tokens_that_are_refused_are_not_charged() -> None:
    gate = Gate()
    with pytest.raises(InvalidArgument, match="token_burst"), gate.admission.admit(generate_request(), 60.0) as place:
        place.take_tokens(30, 80)
    assert (gate.counts, gate.share.tokens) == (NOTHING, 0)
