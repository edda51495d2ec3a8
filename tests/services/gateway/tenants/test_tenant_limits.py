"""Which limits apply to a tenant."""

from tokenloom.services.gateway.tenants.tenant import TenantLimits, gateway_limits, merged, with_burst


def limits(options: TenantLimits, *, is_shared: bool) -> TenantLimits:
    return gateway_limits(options, is_shared=is_shared, max_live=9, max_body_bytes=100)


def test_a_gateway_with_one_tenant_has_no_defaults() -> None:
    assert limits(TenantLimits(), is_shared=False) == TenantLimits()
    assert limits(TenantLimits(sessions=3), is_shared=False) == TenantLimits(sessions=3)


def test_one_of_several_tenants_gets_a_part() -> None:
    expected = TenantLimits(live_outputs=4, sessions=256, pending_grammars=32, body_bytes=50)
    assert limits(TenantLimits(), is_shared=True) == expected
    assert limits(TenantLimits(live_outputs=9), is_shared=True).live_outputs == 9


def test_a_tenants_own_limit_wins() -> None:
    own = TenantLimits(live_outputs=1, tokens_per_second=5.0)
    both = merged(own, TenantLimits(live_outputs=8, sessions=8))
    assert both == TenantLimits(live_outputs=1, sessions=8, tokens_per_second=5.0)


def test_the_size_of_a_token_bucket() -> None:
    assert with_burst(TenantLimits(tokens_per_second=2.5)).token_burst == 150
    assert with_burst(TenantLimits(tokens_per_second=0.001)).token_burst == 1
    assert with_burst(TenantLimits(tokens_per_second=2.5, token_burst=7)).token_burst == 7
    assert with_burst(TenantLimits()).token_burst is None
