"""Tests the requests to an API server, over HTTPS."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tokenloom.bench.scale.takeover.lease_server import TOKEN, LeaseServer, local_api, make_account, serving
from tokenloom.services.coordinator.lease import (
    CONFLICT,
    NOT_FOUND,
    ApiError,
    KubernetesLease,
    LeaseApi,
    _lease,
)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    return make_account(tmp_path)


@pytest.fixture
def port(account: Path) -> Iterator[int]:
    with serving(LeaseServer(), account) as port:
        yield port


@pytest.fixture
def api(account: Path, port: int) -> Iterator[LeaseApi]:
    with closing(local_api(account, port)) as api:
        yield api


async def test_a_lease_is_taken_and_conflicts_are_seen(api: LeaseApi, account: Path, port: int) -> None:
    await KubernetesLease(api, "coordinator", "a").acquire()
    with closing(local_api(account, port)) as other:
        held = await other.get("coordinator")
    assert held["spec"]["holderIdentity"] == "a"
    await api.replace(held)
    with pytest.raises(ApiError) as conflict:
        await api.replace(held)
    with pytest.raises(ApiError) as missing:
        await api.get("another")
    with pytest.raises(ApiError) as twice:
        await api.create({**held, "metadata": {"name": "coordinator"}})
    assert [each.value.status for each in (conflict, missing, twice)] == [CONFLICT, NOT_FOUND, CONFLICT]
    assert "modified" in str(conflict.value)


async def test_the_token_is_read_again_when_it_changes(api: LeaseApi, account: Path) -> None:
    (account / "token").write_text("stale")
    with pytest.raises(ApiError) as refused:
        await api.get("coordinator")
    assert (refused.value.status, "stale" in str(refused.value)) == (401, False)
    (account / "token").write_text(TOKEN)
    with pytest.raises(ApiError) as missing:
        await api.get("coordinator")
    assert missing.value.status == NOT_FOUND


async def test_a_server_that_is_away_or_not_the_one_expected_is_no_answer(account: Path, port: int) -> None:
    stranger = LeaseApi(account, "127.0.0.1", port)  # its certificate names another host
    with pytest.raises(ApiError) as refused:
        await stranger.get("coordinator")
    assert refused.value.status == 0
    assert "certificate" in str(refused.value)


@pytest.mark.parametrize("answer", [b"{}", b'{"metadata": []}', b'{"metadata": {}, "spec": 5}', b"[]", b"<html>"])
def test_an_answer_that_is_no_lease_is_an_error(answer: bytes) -> None:
    with pytest.raises(ApiError, match="answer is no"):
        _lease(answer)
