"""Turns of sessions are recognised, by an id or by the beginnings of prompts, within one tenant."""

from collections import Counter

import numpy as np
import pytest

from tests.services.coordinator.test_roles import BLOCK_SIZE, BOTH, DECODE, PREFILL, Clock, Fleet, identity, report
from tokenloom.request.prefix_schedule import SESSION_HASHES, scheduled
from tokenloom.services.coordinator.picks import sessions
from tokenloom.services.coordinator.picks.sessions import SessionTable
from tokenloom.services.coordinator.prefixes.hash_table import words_of
from tokenloom.services.runtime.placement.rules import Rule, cost, score
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, PickRequest
from tokenloom.v1.engine_pb2 import SessionTurn
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

LONG = SESSION_HASHES
A, B = (EngineIdentity(engine_id=name, epoch=1, fingerprint=Fingerprint(block_size=BLOCK_SIZE)) for name in "ab")


def chain(*parts: tuple[int, int]) -> list[int]:
    """Return the hashes of a prompt: so many blocks of each text. Equal beginnings have equal hashes."""
    hashes, before = list[int](), 0
    for text, count in parts:
        for _ in range(count):
            before = hash((before, text)) & ((1 << 64) - 1)
            hashes.append(before)
    return hashes


class Mesh:
    """The sessions of one coordinator, and its time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tokens = Counter[str]()
        self.sessions = SessionTable(self.clock, self.count)

    def count(self, engine: EngineRef, tokens: int) -> None:
        self.tokens[engine.engine_id] += tokens

    def turn(
        self,
        hashes: list[int],
        engine: EngineIdentity = A,
        *,
        session: int = 0,
        tenant: str = "t",
        more_tokens: int = 0,
        role: EngineRole = PREFILL,
        exclude: str = "",
        after: float = 0.0,
        keep: int = 0,
    ) -> SessionTurn | None:
        self.clock.now += after
        request = PickRequest(
            role=role,
            prompt_tokens=len(hashes) * BLOCK_SIZE + 1 + more_tokens,
            block_hash_prefixes=scheduled(hashes),
            session=session,
            tenant=tenant,
            keep_seconds=keep,
            exclude=[EngineRef(engine_id=exclude)] if exclude else [],
        )
        found = self.sessions.find(request)
        return None if found is None else self.sessions.note(found, request, engine)


def test_a_line_is_recognised_without_an_id_from_its_second_turn_on() -> None:
    mesh = Mesh()
    assert mesh.turn(chain((1, LONG))) is None, "nothing says that another turn follows"
    second = mesh.turn(chain((1, LONG + 6)), after=8.0)
    assert second is not None
    assert (second.past_tokens, second.return_milliseconds, second.moved) == (LONG * BLOCK_SIZE, 0, False)
    third = mesh.turn(chain((1, LONG + 10)), B, after=4.0)
    assert third is not None
    assert (third.branch, third.return_milliseconds, third.moved) == (second.branch, 6727, True)
    assert third.past_tokens == (LONG + 6) * BLOCK_SIZE


def test_a_turn_that_differs_in_the_tokens_that_opened_the_answer_goes_on() -> None:
    mesh = Mesh()
    mesh.turn(chain((1, LONG), (2, 1)))
    second = mesh.turn(chain((1, LONG), (3, 7)))
    assert second is not None
    assert second.past_tokens == LONG * BLOCK_SIZE


def test_a_short_prompt_is_a_turn_only_by_an_id() -> None:
    mesh = Mesh()
    for count in range(4, 9, 2):
        assert mesh.turn(chain((1, count))) is None
    assert len(mesh.sessions) == 0
    first = mesh.turn(chain((1, 4)), session=9)
    second = mesh.turn(chain((1, 6)), session=9, after=2.0)
    assert first is not None
    assert second is not None
    assert (first.past_tokens, first.return_milliseconds) == (0, 0)
    assert (second.branch, second.past_tokens, second.return_milliseconds) == (first.branch, 4 * BLOCK_SIZE, 0)


def test_a_prompt_that_its_client_wants_kept_is_a_turn_whatever_its_length() -> None:
    mesh = Mesh()
    first = mesh.turn(chain((1, 4)), keep=300)
    assert first is not None
    assert (first.keep_seconds, first.past_tokens) == (300, 0)
    assert mesh.tokens["a"] == 4 * BLOCK_SIZE + 1
    second = mesh.turn(chain((1, 6)), keep=3600, more_tokens=9)
    assert second is not None
    assert (second.branch, second.keep_seconds) == (first.branch, 3600)
    assert mesh.turn(chain((2, 4))) is None


def test_questions_after_a_common_beginning_are_no_turns() -> None:
    mesh = Mesh()
    for number in range(20):
        assert mesh.turn(chain((9, LONG)), more_tokens=number % 7) is None
        assert mesh.turn(chain((1, LONG), (number + 2, 5))) is None


@pytest.mark.parametrize("session", [0, 9])
def test_no_other_tenant_meets_a_session(session: int) -> None:
    mesh = Mesh()
    mesh.turn(chain((1, LONG)), session=session)
    mine = mesh.turn(chain((1, LONG + 3)), session=session, after=1.0)
    theirs = mesh.turn(chain((1, LONG + 6)), session=session, tenant="other")
    assert mine is not None
    if session:
        assert theirs is not None
        assert theirs.branch != mine.branch
        assert (theirs.past_tokens, theirs.return_milliseconds) == (0, 0)
    else:
        assert theirs is None


def test_an_id_does_not_make_another_conversation_a_turn() -> None:
    mesh = Mesh()
    first = mesh.turn(chain((1, 50)), session=9)
    title = mesh.turn(chain((2, 3)), session=9)
    agent = mesh.turn(chain((1, 10), (3, 30)), session=9)
    second = mesh.turn(chain((1, 60)), session=9)
    assert first is not None
    assert title is not None
    assert agent is not None
    assert second is not None
    assert len({first.branch, title.branch, agent.branch}) == 3
    assert second.branch == first.branch
    assert (title.past_tokens, agent.past_tokens) == (0, 10 * BLOCK_SIZE)


def test_an_id_that_every_request_carries_says_nothing() -> None:
    mesh = Mesh()
    found = [mesh.turn(chain((text, 20)), session=9) for text in range(20)]
    assert [each is not None for each in found] == [True] * 4 + [False] * 16
    assert len(mesh.sessions) == sessions.MAX_SESSION_BRANCHES


def test_the_main_line_of_a_session_outlives_the_many_that_begin_beside_it() -> None:
    """Its sub-agents send the same id; a turn of a line that was forgotten went to another engine."""
    mesh = Mesh()
    main = mesh.turn(chain((1, LONG)), session=9)
    assert main is not None
    for number in range(2 * sessions.MAX_SESSION_BRANCHES):
        agent = mesh.turn(chain((2 + number, 10)), B, session=9, after=1.0)
        mesh.turn(chain((2 + number, 14)), B, session=9, after=1.0)
        turn = mesh.turn(chain((1, LONG + 4 * (1 + number))), session=9, after=1.0)
        assert agent is not None
        assert turn is not None
        assert turn.branch == main.branch


def test_the_main_line_of_a_session_outlives_the_ten_that_run_side_by_side() -> None:
    """It goes on when they have ended: its last turn is older than all of theirs."""
    mesh = Mesh()
    main = mesh.turn(chain((1, LONG)), session=9)
    assert main is not None
    for count in range(10, 19, 4):
        for number in range(10):
            mesh.turn(chain((2 + number, count)), B, session=9, after=1.0)
    turn = mesh.turn(chain((1, LONG + 4)), session=9, after=1.0)
    assert turn is not None
    assert (turn.branch, turn.past_tokens) == (main.branch, LONG * BLOCK_SIZE)


def test_a_branch_leaves_an_earlier_turn_and_is_expected_like_it() -> None:
    mesh = Mesh()
    for count in (LONG, LONG + 4, LONG + 8, LONG + 12):
        mesh.turn(chain((1, count)), after=6.0)
    assert mesh.turn(chain((1, LONG + 4), (2, 9)), B) is None
    branch = mesh.turn(chain((1, LONG + 4), (2, 12)), B, after=9.0)
    trunk = mesh.turn(chain((1, LONG + 20)))
    assert branch is not None
    assert trunk is not None
    assert branch.branch != trunk.branch
    assert (branch.moved, trunk.moved) == (False, False), "each goes on where it was"
    assert branch.return_milliseconds == 6640


def test_another_attempt_and_another_leg_are_no_turns() -> None:
    mesh = Mesh()
    mesh.turn(chain((1, LONG)))
    mesh.turn(chain((1, LONG + 2)), after=8.0)
    before = mesh.turn(chain((1, LONG + 4)), after=8.0)
    again = mesh.turn(chain((1, LONG + 4)), B, after=1.0, more_tokens=3, exclude="a")
    decode = mesh.turn(chain((1, LONG + 4)), A, role=DECODE, more_tokens=4)
    after = mesh.turn(chain((1, LONG + 9)), B, after=7.0)
    assert before is not None
    assert again is not None
    assert decode is not None
    assert after is not None
    assert before.branch == again.branch == decode.branch == after.branch
    assert after.return_milliseconds == 8000, "the attempt began no interval"
    assert not after.moved, "the prompt was computed on the second engine"


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], 0),
        ([5.0], 0),
        ([5.0, 5.0], 5000),
        ([4.0, 6.0, 4.0, 6.0, 5.0], 4846),
        ([0.0, 0.0], 1),
        ([1.0, 120.0, 1.0, 120.0, 1.0], 0),
        ([1.0, 120.0, *[10.0] * 20], 10008),
    ],
)
def test_only_regular_intervals_predict_the_next_turn(gaps: list[float], expected: int) -> None:
    mesh = Mesh()
    found = mesh.turn(chain((1, 40)), session=9)
    for number, gap in enumerate(gaps, 1):
        found = mesh.turn(chain((1, 40 + number)), session=9, after=gap)
    assert found is not None
    assert found.return_milliseconds == pytest.approx(expected, abs=400)
    assert bool(found.return_milliseconds) == bool(expected)


def test_an_engine_without_room_keeps_its_session() -> None:
    fleet = Fleet("b0", "b1")
    assert fleet.pick(BOTH, 1700, block_hash_prefixes=chain((1, 100)), session=9) == "b0*"
    fleet.load("b0", running=1, free_kv_blocks=10)
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110)), session=9) == "b0*"
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110))) == "b1*"


def sharing(*stores: bytes, rule: Rule = score) -> Fleet:
    """Engines b0, b1, ..., each with the store that it shares."""
    fleet = Fleet(*(f"b{number}" for number in range(len(stores))), rule=rule)
    for name, store in zip(fleet.records, stores, strict=True):
        with_store = identity(name)
        with_store.kv_store = store
        fleet.records[name] = fleet.registry.join(with_store, report(name))
    return fleet


@pytest.mark.parametrize("rule", [score, cost])
@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ((1000, 1000, 1000), "b0*"),  # no engine is better than the one that has its KV
        ((110, 1000, 1000), "b2*"),  # the store's other one
        ((110, 1000, 100), "b0*"),  # no better: it has no room, and no shorter queue
        ((0, 1000, 100), "b0*"),
        ((-100, 1000, 100), "b2*"),  # its queue is shorter by more than the turn
    ],
)
def test_a_turn_without_room_begins_where_a_shared_store_has_its_kv(
    rule: Rule, free: tuple[int, int, int], expected: str
) -> None:
    fleet = sharing(b"one", b"", b"one", rule=rule)
    for name in ("b1", "b2"):
        fleet.load(name, waiting=9)
    assert fleet.pick(BOTH, 1700, block_hash_prefixes=chain((1, 100)), session=9) == "b0*"
    for name, blocks in zip(fleet.records, free, strict=True):
        ahead = max(0, -blocks) * BLOCK_SIZE
        fleet.load(name, running=1, free_kv_blocks=max(0, blocks), waiting=int(blocks < 0), waiting_tokens=ahead)
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110)), session=9) == expected


@pytest.mark.parametrize("stores", [(b"", b""), (b"one", b""), (b"one", b"two")])
def test_a_turn_waits_for_its_kv_where_no_store_has_it(stores: tuple[bytes, bytes]) -> None:
    fleet = sharing(*stores)
    assert fleet.pick(BOTH, 1700, block_hash_prefixes=chain((1, 100)), session=9) == "b0*"
    fleet.load("b0", running=1, free_kv_blocks=10)
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110)), session=9) == "b0*"


@pytest.mark.parametrize("free", [1000, 50])
def test_a_turn_leaves_an_engine_that_failed_it_for_one_of_its_store(free: int) -> None:
    """Also for one that has no room now: the engine that failed it has some, which is of no use."""
    fleet = sharing(b"one", b"", b"one")
    fleet.load("b2", running=3, free_kv_blocks=free)
    assert fleet.pick(BOTH, 1700, block_hash_prefixes=chain((1, 100)), session=9) == "b0*"
    failed = [EngineRef(engine_id="b0", epoch=1)]
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110)), session=9, exclude=failed) == "b2*"


def test_the_answer_says_that_a_store_has_what_another_engine_computed() -> None:
    fleet = sharing(b"one", b"one")
    fields = {"fingerprint": Fingerprint(model="m"), "role": BOTH, "prompt_tokens": 1700, "session": 9}
    prompt = chain((1, 100))
    first = fleet.registry.pick(PickRequest(**fields, block_hash_prefixes=prompt)).session
    fleet.load("b0", running=1, free_kv_blocks=10)
    second = fleet.registry.pick(PickRequest(**{**fields, "prompt_tokens": 1800}, block_hash_prefixes=[*prompt, 1]))
    third = fleet.registry.pick(PickRequest(**{**fields, "prompt_tokens": 1900}, block_hash_prefixes=[*prompt, 1, 2]))
    turns = [each for each in (first, second.session, third.session) if each is not None]
    assert [(turn.moved, turn.from_store) for turn in turns] == [(False, False), (True, True), (False, False)]
    assert second.engine.engine_id == third.engine.engine_id == "b1"


def test_what_an_engine_can_load_counts_in_part() -> None:
    fleet = sharing(b"one", b"one", b"")
    prompt = chain((1, 100))
    assert fleet.pick(PREFILL, 1600, block_hash_prefixes=prompt).startswith("b0")
    fleet.load("b0", running=9)
    fleet.load("b2", running=1)
    assert fleet.pick(PREFILL, 1600, block_hash_prefixes=prompt).startswith("b1")
    fleet.load("b1", running=2)
    assert fleet.pick(PREFILL, 1600, block_hash_prefixes=chain((2, 100))).startswith("b2"), "no engine has it"


def test_the_tokens_of_sessions_count_where_their_next_turns_are_expected() -> None:
    mesh = Mesh()
    mesh.turn(chain((1, LONG)))
    assert not mesh.tokens, "nothing says that another turn follows"
    mesh.turn(chain((1, LONG + 4)))
    mesh.turn(chain((2, 10)), B, session=9)
    assert mesh.tokens == {"a": (LONG + 4) * BLOCK_SIZE + 1, "b": 161}
    mesh.turn(chain((2, 20)), session=9)
    assert mesh.tokens == {"a": (LONG + 4) * BLOCK_SIZE + 1 + 321, "b": 0}
    mesh.clock.now += sessions.FORGET_SECONDS + 1
    mesh.turn(chain((3, LONG)))
    assert mesh.tokens == {"a": 0, "b": 0}


@pytest.mark.parametrize("rule", [score, cost])
def test_sessions_that_begin_alike_are_spread_by_the_kv_that_they_need(rule: Rule) -> None:
    fleet = Fleet("b0", "b1", rule=rule)
    placed = [
        fleet.pick(BOTH, 4000, block_hash_prefixes=scheduled(chain((1, 200), (number, 50))), session=number)
        for number in range(2, 22)
    ]
    assert placed.count("b0*") == placed.count("b1*")
    columns = fleet.registry._columns
    assert columns.session_share[:2].tolist() == pytest.approx([2.5, 2.5])
    fleet.registry.leave(fleet.records["b0"])
    assert columns.session_share[:2].tolist() == pytest.approx([0, 2.5])
    fleet.clock.now += sessions.FORGET_SECONDS + 1
    assert fleet.pick(BOTH, 4000, block_hash_prefixes=chain((1, 200)), session=99) == "b1*"
    assert columns.session_share[:2].tolist() == pytest.approx([0, 0.25])


@pytest.mark.parametrize("leaves", [True, False])
def test_the_sessions_of_an_engine_count_again_when_it_joins_again(leaves: bool) -> None:
    fleet = Fleet("b0")
    assert fleet.pick(BOTH, 1600, block_hash_prefixes=chain((1, 100)), session=9) == "b0*"
    shares = fleet.registry._columns.session_share
    assert shares[0] == pytest.approx(0.1)
    if leaves:
        fleet.registry.leave(fleet.records["b0"])
    fleet.records["b0"] = fleet.registry.join(identity("b0"), report("b0"))
    assert shares[0] == pytest.approx(0.1)
    fleet.clock.now += sessions.FORGET_SECONDS + 1
    fleet.pick(BOTH, 1600, block_hash_prefixes=chain((2, 100)), session=10)
    assert shares[0] == pytest.approx(0.1), "the forgotten session counts no more, the new one does"


def test_the_sessions_of_a_predecessor_do_not_count_on_the_engine_that_overtakes_it() -> None:
    fleet = Fleet("b0")
    fleet.pick(BOTH, 1600, block_hash_prefixes=chain((1, 100)), session=9)
    successor = identity("b0")
    successor.epoch = 2
    fleet.registry.join(successor, report("b0"))
    assert fleet.registry._columns.session_share[0] == 0


def test_a_client_that_begins_to_name_its_session_keeps_it() -> None:
    mesh = Mesh()
    mesh.turn(chain((1, LONG)))
    mesh.turn(chain((1, LONG + 4)), session=9)
    assert (found := mesh.turn(chain((1, LONG - 9), (2, 1)), session=9)) is not None
    assert found.past_tokens == (LONG - 9) * BLOCK_SIZE


def test_sessions_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TENANT_BRANCHES", 5)
    monkeypatch.setattr(sessions, "MAX_BRANCHES", 8)
    mesh = Mesh()
    for text in range(20):
        mesh.turn(chain((text, 40)), session=text + 1)
    assert len(mesh.sessions) == 5
    for tenant in range(20):
        mesh.turn(chain((1, 40)), session=1, tenant=str(tenant))
    assert len(mesh.sessions) == 8
    mesh.clock.now += sessions.FORGET_SECONDS + 1
    mesh.turn(chain((1, 40)), session=1)
    assert len(mesh.sessions) == 1
    assert list(mesh.sessions._tenants) == ["t"]


def test_the_points_of_a_line_are_bounded() -> None:
    mesh = Mesh()
    for count in range(200):
        mesh.turn(chain((1, LONG + count)))
    (tenant,) = mesh.sessions._tenants.values()
    assert len(tenant.points) <= sessions.TURNS * 3
    mesh.clock.now += sessions.FORGET_SECONDS + 1
    mesh.turn(chain((2, LONG)))
    (tenant,) = mesh.sessions._tenants.values()
    assert len(tenant.points) == 3


def test_the_filter_has_the_points_of_all_tenants_and_no_others() -> None:
    mesh = Mesh()
    for count in range(120):
        mesh.turn(chain((count % 7, LONG + count)), tenant=str(count % 3))
    points = [point for tenant in mesh.sessions._tenants.values() for point in tenant.points]
    words = np.array(points, np.uint64)
    assert len(mesh.sessions._filter.possible(words)) == len(points) > 20
    assert mesh.sessions._filter._counts.sum() == len(points)
    assert not mesh.sessions._filter.possible(words_of(range(500, 510)))
    mesh.clock.now += sessions.FORGET_SECONDS + 1
    mesh.turn(chain((99, LONG)))
    assert mesh.sessions._filter._counts.sum() == 3


@pytest.mark.parametrize("rule", [score, cost])
def test_every_turn_of_sessions_goes_to_their_kv(rule: Rule) -> None:
    fleet = Fleet("b0", "b1", rule=rule)
    homes = dict[int, str]()
    for turn in range(8):
        for number in range(2, 11):
            fleet.load("b0", running=turn % 3, free_kv_blocks=1000)
            fleet.load("b1", running=turn * number % 4, free_kv_blocks=1000)
            prompt = chain((1, 100), (number, 20 + 10 * turn))
            name = fleet.pick(BOTH, len(prompt) * BLOCK_SIZE + 5, block_hash_prefixes=scheduled(prompt), session=number)
            assert homes.setdefault(number, name) == name
    assert set(homes.values()) == {"b0*", "b1*"}


@pytest.mark.parametrize(("waiting", "expected"), [(0, "b0*"), (3, "b0*"), (5, "b1*")])
def test_a_session_returns_to_its_engine_unless_the_load_outweighs_it(waiting: int, expected: str) -> None:
    fleet = Fleet("b0", "b1")
    for each in fleet.records.values():
        each.identity.num_kv_blocks = 100_000
    first, second = scheduled(chain((1, 400))), scheduled(chain((1, 440)))
    tokens = 7000
    assert fleet.pick(BOTH, tokens, block_hash_prefixes=first, session=9) == "b0*"
    fleet.load("b0", waiting=waiting)
    assert fleet.pick(BOTH, tokens + 99, block_hash_prefixes=second, session=9) == expected


def test_a_session_whose_cache_was_evicted_returns_all_the_same() -> None:
    fleet = Fleet("b0", "b1")
    prompt = chain((1, 100))
    assert fleet.pick(BOTH, 1700, block_hash_prefixes=prompt, session=9) == "b0*"
    fleet.registry.prefixes.remove(prompt, fleet.records["b0"].row)
    fleet.load("b0", running=1)
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((1, 110)), session=9) == "b0*"
    assert fleet.pick(BOTH, 1800, block_hash_prefixes=chain((2, 110))) == "b1*"


def test_the_answer_to_a_pick_names_the_turn() -> None:
    fleet = Fleet("b0")
    request = PickRequest(fingerprint=Fingerprint(model="m"), role=BOTH, prompt_tokens=100, session=9)
    assert fleet.registry.pick(request).response().session.branch == 7 << 32 | 1, "numbers of this coordinator alone"
    request.session = 0
    assert not fleet.registry.pick(request).response().HasField("session")
