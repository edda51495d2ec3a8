from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.engine_core.data.request import RemoteKVState, RequestKV
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput
from tokenloom.engine_core.kv_cache.block_pool import BlockPool
from tokenloom.engine_core.kv_cache.state_slots import StateSlotPool
from tokenloom.engine_core.kv_transfer.core_kv import MultiConnector
from tokenloom.engine_core.kv_transfer.kv_connector import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorStats,
    StepTransfers,
    take_updates,
)

EMPTY = SchedulerOutput([], CachedRequestData([], [], [], {}), {}, 0, [], [])


class Metadata(KVConnectorMetadata):
    name: str


class FakeConnector:
    """Notes what is asked of it, answers what it is told to."""

    def __init__(
        self, name: str, calls: list[tuple[str, Any]], *, matched: int | None = 0, holds: bool = False
    ) -> None:
        self.name = name
        self.calls = calls
        self.matched = matched
        self.holds = holds
        self.has_metadata = True
        self.oldest: str | None = None
        self.news: KVConnectorOutput | None = None

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        self._note("bind_block_pool")

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note("match")
        offer = self.matched and max(self.matched - num_computed_tokens, 0)
        return offer, bool(offer)

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        self.calls.append((f"{self.name}.alloc", num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        return Metadata(self.name) if self.has_metadata else None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._note("update")

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._note("finished")
        return self.holds

    def request_aborted(self, request_id: str) -> None:
        self._note("aborted")

    def revoke_oldest(self) -> str | None:
        oldest, self.oldest = self.oldest, None
        return oldest

    def num_leases(self) -> int:
        return 1

    def register_kv_caches(self, pool: Any) -> None:
        self._note("register")

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        assert metadata == Metadata(self.name)
        self._note("save")

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert metadata == Metadata(self.name)
        self._note("load")

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        assert metadata == Metadata(self.name)
        self._note("ended")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return (self.news.finished_sending, self.news.finished_recving) if self.news else (set(), set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.news.invalid_block_ids if self.news else set()

    def get_kv_connector_stats(self) -> KVConnectorStats:
        return self.news.stats if self.news else KVConnectorStats()

    def has_updates(self) -> bool:
        return self.news is not None

    def on_update(self, callback: Callable[[], None]) -> None:
        self._note("on_update")

    def shutdown(self) -> None:
        self._note("shutdown")

    def _note(self, what: str) -> None:
        self.calls.append((f"{self.name}.{what}", None))


class Multi:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.first, self.second = FakeConnector("first", self.calls), FakeConnector("second", self.calls)
        self.connector = MultiConnector([self.first, self.second])

    def take_calls(self) -> list[str]:
        names = [name if argument is None else f"{name}({argument})" for name, argument in self.calls]
        self.calls.clear()
        return names


@pytest.fixture
def multi() -> Multi:
    return Multi()


@pytest.fixture
def request_() -> RequestKV:
    return RequestKV("r", [1, 2, 3])


def news(*, sent: set[str] | None = None, received: set[str] | None = None, **stats: Any) -> KVConnectorOutput:
    return KVConnectorOutput(sent or set(), received or set(), stats.pop("invalid", set()), KVConnectorStats(**stats))


@pytest.mark.parametrize(
    ("first", "second", "answer", "allocated"),
    [
        (8, 16, (16, True), ["first.alloc(0)", "second.alloc(16)"]),
        (16, 8, (16, True), ["first.alloc(16)", "second.alloc(0)"]),
        (8, 8, (8, True), ["first.alloc(8)", "second.alloc(0)"]),
        (0, 16, (16, True), ["first.alloc(0)", "second.alloc(16)"]),
        (0, 0, (0, False), ["first.alloc(0)", "second.alloc(0)"]),
        (None, 16, (None, False), ["first.alloc(0)", "second.alloc(0)"]),
        (8, None, (None, False), ["first.alloc(0)", "second.alloc(0)"]),
    ],
)
def test_the_one_that_can_load_most_loads(
    multi: Multi,
    request_: RequestKV,
    first: int | None,
    second: int | None,
    answer: tuple[int | None, bool],
    allocated: list[str],
) -> None:
    multi.first.matched, multi.second.matched = first, second
    assert multi.connector.get_num_new_matched_tokens(request_, 0) == answer
    multi.take_calls()
    multi.connector.update_state_after_alloc(request_, [1, 2], answer[0] or 0)
    assert multi.take_calls() == allocated


def test_a_decode_leg_pulls_what_its_prefill_left(multi: Multi, request_: RequestKV) -> None:
    multi.first.matched, multi.second.matched = 8, 16
    request_.remote = RemoteKVState(awaits_tokens=True)
    assert multi.connector.get_num_new_matched_tokens(request_, 0) == (8, True)
    assert multi.take_calls() == ["first.match"]


def test_an_offer_that_was_withdrawn_is_forgotten(multi: Multi, request_: RequestKV) -> None:
    multi.first.matched = 8
    multi.connector.get_num_new_matched_tokens(request_, 0)
    multi.first.matched, multi.second.matched = 0, 4
    multi.connector.get_num_new_matched_tokens(request_, 0)
    multi.take_calls()
    multi.connector.update_state_after_alloc(request_, [1, 2], 4)
    assert multi.take_calls() == ["first.alloc(0)", "second.alloc(4)"]


def test_all_save_before_one_loads(multi: Multi) -> None:
    transfers = StepTransfers(multi.connector, EMPTY)
    assert multi.take_calls() == ["first.save", "second.save"]
    transfers.start_loads()
    transfers.start_loads()
    assert multi.take_calls() == ["first.load", "second.load"]
    transfers.step_ended()
    assert multi.take_calls() == ["first.ended", "second.ended"]


def test_only_connectors_with_work_in_a_step_are_called(multi: Multi) -> None:
    multi.second.has_metadata = False
    transfers = StepTransfers(multi.connector, EMPTY)
    transfers.start_loads()
    transfers.step_ended()
    assert multi.take_calls() == ["first.save", "first.load", "first.ended"]
    multi.first.has_metadata = False
    StepTransfers(multi.connector, EMPTY).start_loads()
    assert multi.take_calls() == []


def test_blocks_are_free_when_the_last_holder_lets_go(multi: Multi, request_: RequestKV) -> None:
    assert not multi.connector.request_finished(request_, [1], is_prefilled=True)
    multi.first.holds = multi.second.holds = True
    assert multi.connector.request_finished(request_, [1], is_prefilled=True)
    multi.first.news = news(sent={"r"})
    assert take_updates(multi.connector, EMPTY) == news()
    multi.first.news, multi.second.news = None, news(sent={"r"})
    assert take_updates(multi.connector, EMPTY) == news(sent={"r"})


def test_every_connector_hears_that_a_request_ended(multi: Multi, request_: RequestKV) -> None:
    multi.first.holds = True
    assert multi.connector.request_finished(request_, [1], is_prefilled=True)
    multi.connector.request_aborted("r")
    assert multi.take_calls() == ["first.finished", "second.finished", "first.aborted", "second.aborted"]


def test_news_are_put_together(multi: Multi) -> None:
    assert take_updates(multi.connector, EMPTY) is None
    multi.first.news = news(
        received={"a"}, invalid={1}, blocks_received=2, bytes_received={"shm": 5}, failures={"a": "checksum"}
    )
    multi.second.news = news(
        received={"b"},
        invalid={2},
        blocks_received=3,
        bytes_received={"shm": 1, "offload": 7},
        failures={"b": "timeout"},
    )
    assert take_updates(multi.connector, EMPTY) == news(
        received={"a", "b"},
        invalid={1, 2},
        blocks_received=5,
        bytes_received={"shm": 6, "offload": 7},
        failures={"a": "checksum", "b": "timeout"},
    )


def test_room_is_made_by_whoever_can(multi: Multi, request_: RequestKV) -> None:
    assert multi.connector.revoke_oldest() is None
    multi.second.oldest = "x"
    assert multi.connector.revoke_oldest() == "x"
    # Held by both: the blocks are free only when the other one gives them up, too.
    multi.first.holds = multi.second.holds = True
    multi.connector.request_finished(request_, [1], is_prefilled=True)
    multi.first.oldest = "r"
    assert multi.connector.revoke_oldest() is None
    multi.second.oldest = "r"
    assert multi.connector.revoke_oldest() == "r"


def test_what_concerns_all_is_told_to_all(multi: Multi) -> None:
    connector = multi.connector
    connector.bind_block_pool(BlockPool(1))
    connector.register_kv_caches(None)  # type: ignore[arg-type]
    connector.on_update(lambda: None)
    connector.update_connector_output(news())
    connector.shutdown()
    steps = ("bind_block_pool", "register", "on_update", "update", "shutdown")
    assert multi.take_calls() == [f"{name}.{step}" for step in steps for name in ("first", "second")]
    assert connector.num_leases() == 2
    assert not connector.has_updates()
    multi.second.news = news()
    assert connector.has_updates()
