"""The shares of several tenants, and what /metrics shows of them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tokenloom.request.errors import ResourceExhausted
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, Tenant, TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import LIMITS, TenantMetrics, TenantShares

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
