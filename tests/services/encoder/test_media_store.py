"""Which files stay, and for how long."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.services.encoder.fakes import digest_of
from tokenloom.request.errors import PayloadTooLarge, ResourceExhausted
from tokenloom.services.encoder.media_store import FileOwner, MediaStore, Pin
from tokenloom.v1.encoder_pb2 import PutResponse

ROOM, LEASE = 1000, 10.0


class Store:
    """A store whose clock stands at ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = MediaStore[bytes](ROOM, LEASE, lambda: self.now)

    def put(self, name: bytes, size: int, tenant: str = "t", request_id: str = "") -> None:
        data = name * size
        with self.store.arriving(tenant, size):
            self.store.put(FileOwner(tenant, b""), data, PutResponse(digest=digest_of(data)), request_id)

    def has(self, name: bytes, size: int) -> bool:
        return self.store.data(digest_of(name * size)) is not None


def test_the_longest_unused_file_goes_first() -> None:
    files = Store()
    for name in (b"a", b"b", b"c"):
        files.put(name, 300)
    assert files.has(b"a", 300)  # used again
    files.put(b"d", 300)
    assert [files.has(name, 300) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_files_that_no_request_needs_can_be_forgotten() -> None:
    files = Store()
    files.put(b"a", 300)
    files.put(b"b", 200, request_id="r")
    files.put(b"c", 100, request_id="ended")
    files.store.release(Pin("t", "ended"))
    files.store.forget_unused()
    assert [files.has(name, size) for name, size in ((b"a", 300), (b"b", 200), (b"c", 100))] == [False, True, False]
    assert files.store.num_bytes == 200


def test_a_pinned_file_stays_until_its_lease_ends() -> None:
    files = Store()
    files.put(b"a", 400, request_id="r")
    files.put(b"b", 300, "u")
    files.put(b"c", 500, "u")
    assert files.has(b"a", 400)
    assert not files.has(b"b", 300)
    with pytest.raises(ResourceExhausted):
        files.put(b"d", 700)
    files.now = LEASE
    files.put(b"d", 700)
    assert files.store.num_pinned_bytes == 0


def test_a_file_that_is_read_stays_for_another_lease() -> None:
    files = Store()
    files.put(b"a", 400, request_id="r")
    for _ in range(3):
        files.now += LEASE - 1
        assert files.has(b"a", 400)
    assert files.store.num_pinned_bytes == 400
    files.now += LEASE
    files.store.data(b"")
    assert files.store.num_pinned_bytes == 0


def test_a_file_that_grows_takes_no_more_than_is_free() -> None:
    files = Store()
    files.put(b"a", 400, "other", "r")
    files.put(b"b", 300, "u")
    with files.store.arriving("t", 10) as room:
        room.grow_to(250)
        room.grow_to(200)
        assert room.num_bytes == 250
        room.grow_to(600)
        assert not files.has(b"b", 300), "it made room"
        with pytest.raises(ResourceExhausted):
            room.grow_to(601)
    with files.store.arriving("t", 600):
        pass


def test_what_can_never_fit_is_said_so() -> None:
    files = Store()
    with pytest.raises(PayloadTooLarge), files.store.arriving("t", 900) as room:
        room.grow_to(1001)
    files.put(b"a", 1000)


def test_a_tenant_holds_at_most_as_much_as_is_free() -> None:
    files = Store()
    files.put(b"a", 400, "greedy", "r")
    with pytest.raises(ResourceExhausted):
        files.put(b"b", 300, "greedy", "s")
    files.put(b"c", 300, "modest", "r")


class Files(RuleBasedStateMachine):
    """Files come and go; sums are those of what is there, and nothing that is pinned is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.files = Store()
        self.pinned: dict[Pin, dict[tuple[bytes, int], float]] = {}

    @rule(
        name=st.sampled_from([b"a", b"b", b"c", b"d"]),
        size=st.integers(1, 400),
        tenant=st.sampled_from("xy"),
        request_id=st.sampled_from(["", "r", "s"]),
    )
    def put(self, name: bytes, size: int, tenant: str, request_id: str) -> None:
        try:
            self.files.put(name, size, tenant, request_id)
        except ResourceExhausted:
            return
        if request_id:
            self.pinned.setdefault(Pin(tenant, request_id), {})[name, size] = self.files.now + LEASE

    @rule(tenant=st.sampled_from("xy"), request_id=st.sampled_from(["r", "s"]))
    def release(self, tenant: str, request_id: str) -> None:
        self.files.store.release(Pin(tenant, request_id))
        self.pinned.pop(Pin(tenant, request_id), None)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.files.now += seconds

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        for files in self.pinned.values():
            for (name, size), ends_at in files.items():
                assert self.files.now >= ends_at or self.files.has(name, size)

    @invariant()
    def sums_are_right(self) -> None:
        store = self.files.store
        store.data(b"")  # leases end
        assert store.num_bytes == sum(len(file.data) for file in store._files.values()) <= ROOM
        assert store.num_pinned_bytes == sum(len(file.data) for file in store._files.values() if file.pins)
        for tenant in "xy":
            held = [f for f in store._files.values() if any(pin.tenant == tenant for pin in f.pins)]
            assert store._held[tenant] == sum(len(file.data) for file in held)
        assert store._num_pins == sum(len(file.pins) for file in store._files.values())


Files.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFiles = Files.TestCase
