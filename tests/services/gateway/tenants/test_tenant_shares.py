"""What one tenant may have in work, the shares of several tenants, and what /metrics shows of them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tokenloom.request.errors import InvalidArgument, PayloadTooLarge, RateLimitExceeded, ResourceExhausted
from tokenloom.request.limits import DividedLimit
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, Tenant, TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import LIMITS, TenantMetrics, TenantShare, TenantShares

SECRET = b"0123456789abcdef"
A = Tenant(name="a", cache_salt=SECRET, limits=TenantLimits(live_outputs=2, tokens_per_second=10))
B = Tenant(name="b", cache_salt=SECRET)


def shares() -> TenantShares:
    defaults = TenantLimits(live_outputs=4, sessions=3)
    return TenantShares(defaults, is_shared=True, max_live=8, max_sessions=8, max_message_bytes=99, clock=lambda: 0.0)


def test_a_tenant_keeps_its_share() -> None:
    all_shares = shares()
    share = all_shares.of(A)
    assert all_shares.of(A) is share is not all_shares.of(B)
    assert share.limits == TenantLimits(live_outputs=2, sessions=3, tokens_per_second=10, token_burst=600)
    assert share.bucket is not None
    assert all_shares.of(B).limits == TenantLimits(live_outputs=4, sessions=3)
    assert all_shares.of(B).bucket is None
    assert [each.name for each in all_shares] == ["a", "b"]


def test_the_metrics_of_tenants_that_have_sent_a_request() -> None:
    all_shares = shares()
    registry = CollectorRegistry()
    registry.register(TenantMetrics(all_shares))
    share = all_shares.of(A)
    share.take_outputs(2, all_shares.outputs)
    share.take_grammar(b"x")
    share.take_bytes(70, 70)
    share.charge(share.take_tokens(8, 8, is_bounded=True), 12)
    share.refused["sessions"] += 3
    page = generate_latest(registry).decode()
    for line in (
        'tokenloom_tenant_live_outputs{tenant="a"} 2.0',
        'tokenloom_tenant_sessions{tenant="a"} 0.0',
        'tokenloom_tenant_pending_grammars{tenant="a"} 1.0',
        'tokenloom_tenant_body_bytes{tenant="a"} 70.0',
        'tokenloom_tenant_tokens_total{tenant="a"} 12.0',
        'tokenloom_tenant_refused_requests_total{limit="sessions",tenant="a"} 3.0',
    ):
        assert line in page
    assert page.count("refused_requests_total{") == len(LIMITS), "each limit from the start, so that rates are known"
    assert 'tenant="b"' not in page
    assert SECRET.decode() not in page


def test_clients_without_keys_are_one_tenant() -> None:
    all_shares = shares()
    all_shares.of(NO_TENANT)
    assert [each.name for each in all_shares] == [""]


def test_messages_of_all_tenants_together_have_a_bound() -> None:
    all_shares = shares()
    a, b = all_shares.of(A), all_shares.of(B)
    first = a.take_message(40, all_shares.messages)
    with pytest.raises(ResourceExhausted, match="40 of 99 bytes of messages that are not answered"):
        a.take_message(20, all_shares.messages)
    second = b.take_message(29, all_shares.messages)
    with pytest.raises(ResourceExhausted, match="69 of 99 bytes"):
        b.take_message(31, all_shares.messages)
    assert (a.body_bytes, b.body_bytes, b.refused["max_body_bytes_in_flight"]) == (40, 29, 1)
    for message in (first, second):
        message.release()
    assert (a.body_bytes, b.body_bytes, all_shares.messages.taken) == (0, 0, 0)


def test_bodies_over_http_take_no_room_of_messages() -> None:
    all_shares = shares()
    a, b = all_shares.of(A), all_shares.of(B)
    with a.take_bytes(70, 70), b.take_message(10, all_shares.messages):
        a.take_message(40, all_shares.messages).release()


def share(**limits: float) -> TenantShare:
    return TenantShare("a", TenantLimits(**limits), lambda: 100.0)  # type: ignore[arg-type]


def room(size: int = 100, *, is_divided: bool = False) -> DividedLimit:
    return DividedLimit(size, is_divided=is_divided)


def test_outputs_in_work() -> None:
    tenant, places = share(live_outputs=4), room()
    three = tenant.take_outputs(3, places)
    with pytest.raises(
        RateLimitExceeded, match=r"3 outputs of this tenant are in work; .* live_outputs is 4"
    ) as caught:
        tenant.take_outputs(2, places)
    assert (caught.value.limit, caught.value.http_status, caught.value.retry_after) == ("live_outputs", 429, 1.0)
    one = tenant.take_outputs(1, places)
    assert (tenant.live_outputs, places.taken) == (4, 4)
    three.release(2)
    assert (tenant.live_outputs, places.taken) == (2, 2)
    three.release()
    one.release()
    assert (tenant.live_outputs, places.taken) == (0, 0)
    assert tenant.refused == {"live_outputs": 1}


def test_a_request_that_never_fits_is_not_worth_a_retry() -> None:
    tenant = share(live_outputs=4)
    with pytest.raises(InvalidArgument, match=r"asks for 5 outputs; .* live_outputs is 4") as caught:
        tenant.take_outputs(5, room())
    assert (caught.value.field, caught.value.retry_after) == ("n", None)
    assert tenant.refused == {"live_outputs": 1}


def test_the_gateways_limit_is_no_fault_of_the_tenant() -> None:
    places = room(4)
    share().take_outputs(4, places)
    tenant = share(live_outputs=4)
    with pytest.raises(ResourceExhausted) as caught:
        tenant.take_outputs(1, places)
    assert caught.value.http_status == 503
    assert (tenant.live_outputs, tenant.refused) == (0, {"max_live_requests": 1})


def test_sessions() -> None:
    tenant, places = share(sessions=1), room(2)
    with tenant.take_session(places):
        with pytest.raises(RateLimitExceeded, match=r"1 sessions of this tenant are open") as caught:
            tenant.take_session(places)
        assert caught.value.limit == "sessions"
        with share().take_session(places):
            with pytest.raises(ResourceExhausted, match=r"2 of 2 sessions") as full:
                share().take_session(places)
            assert full.value.http_status == 503
    assert (tenant.sessions, places.taken, tenant.refused) == (0, 0, {"sessions": 1})


def test_a_grammar_that_several_requests_wait_for_counts_once() -> None:
    tenant = share(pending_grammars=2)
    first, *_, other, last = [tenant.take_grammar(grammar) for grammar in (b"x", b"x", b"y", b"x")]
    assert tenant.pending_grammars == 2
    with pytest.raises(RateLimitExceeded, match=r"limit pending_grammars is 2"):
        tenant.take_grammar(b"z")
    first.release()
    last.release()
    last.release()
    assert tenant.pending_grammars == 2, "another request waits for the same one"
    other.release()
    tenant.take_grammar(b"z")
    assert tenant.pending_grammars == 2


def test_bytes() -> None:
    tenant = share(body_bytes=10)
    with tenant.take_bytes(6, 6):
        with pytest.raises(RateLimitExceeded, match=r"holds 6 bytes .*, and 5 would be added; .* body_bytes is 10"):
            tenant.take_bytes(5, 5)
        tenant.take_bytes(4, 10).release()
    assert tenant.body_bytes == 0
    with tenant.take_bytes(6, 6), pytest.raises(PayloadTooLarge, match="12 bytes"):
        tenant.take_bytes(6, 12)
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        tenant.take_bytes(11, 11)
    assert tenant.refused == {"body_bytes": 3}


def test_tokens_are_reserved_and_charged_as_used() -> None:
    tenant = share(tokens_per_second=10, token_burst=100)
    reserved = tenant.take_tokens(20, 60, is_bounded=True)
    assert reserved is not None
    assert reserved.amount == 80
    with pytest.raises(RateLimitExceeded, match=r"may use 30 tokens, and this tenant has 20 left") as caught:
        tenant.take_tokens(10, 20, is_bounded=True)
    assert (caught.value.limit, caught.value.retry_after) == ("tokens_per_second", 1.0)
    tenant.charge(reserved, 25)
    assert tenant.tokens == 25
    rest = tenant.take_tokens(15, 60, is_bounded=True)
    assert rest is not None
    assert rest.amount == 75


def test_a_request_above_the_burst_is_refused_only_if_the_client_chose_its_size() -> None:
    tenant = share(tokens_per_second=10, token_burst=100)
    with pytest.raises(
        InvalidArgument, match=r"20 prompt tokens and 90 output tokens; .* token_burst is 100"
    ) as caught:
        tenant.take_tokens(20, 90, is_bounded=True)
    assert (caught.value.field, tenant.refused) == ("max_tokens", {"token_burst": 1})
    reserved = tenant.take_tokens(20, 90, is_bounded=False)
    assert reserved is not None
    assert reserved.amount == 100
    tenant.charge(reserved, 110)
    with pytest.raises(RateLimitExceeded, match="has 0 left") as owing:
        tenant.take_tokens(1, 9, is_bounded=True)
    assert owing.value.retry_after == 2.0, "10 are owed, 10 are wanted"


def test_without_limits_all_is_admitted_and_counted() -> None:
    tenant, places = share(), room(10_000)
    tenant.take_outputs(5000, places)
    tenant.take_bytes(1 << 40, 1 << 40)
    for number in range(100):
        tenant.take_grammar(bytes([number]))
    reserved = tenant.take_tokens(1 << 20, 1 << 20, is_bounded=True)
    assert reserved is None
    tenant.charge(reserved, 7)
    assert (tenant.live_outputs, tenant.pending_grammars, tenant.tokens) == (5000, 100, 7)
