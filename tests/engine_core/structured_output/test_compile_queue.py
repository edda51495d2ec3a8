"""Tests in what order grammars are compiled, and which are refused."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.compiler import Compile, CompileQueue, CompileQueueFull


def add(queue: CompileQueue, name: str, tenant: str) -> Compile:
    compile_ = Compile(StructuredOutput(GrammarKind.REGEX, name))
    queue.add(compile_, tenant)
    compile_.join(name, tenant)
    return compile_


def name_of(compile_: Compile | None) -> str:
    assert compile_ is not None
    return compile_.constraint.source


def serve(queue: CompileQueue, seconds: float = 1.0) -> str:
    """Compile the next one, alone. Returns its name."""
    compile_ = queue.take()
    assert compile_ is not None
    queue.ended(compile_, seconds)
    return name_of(compile_)


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    queue = CompileQueue()
    for name in "abc":
        add(queue, name, "")
    assert [serve(queue) for _ in range(3)] == ["a", "b", "c"]
    assert queue.take() is None


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_tenants_take_turns(seconds: float) -> None:
    queue = CompileQueue()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        add(queue, name, name[0])
    assert [serve(queue, seconds) for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_tenant_whose_compiles_took_long_waits_behind_others() -> None:
    queue = CompileQueue()
    for name in ("a1", "b1", "a2", "b2", "b3", "b4", "b5"):
        add(queue, name, name[0])
    served = []
    for _ in range(7):
        compile_ = queue.take()
        assert compile_ is not None
        served.append(name_of(compile_))
        queue.ended(compile_, 2.0 if compile_.payer == "a" else 0.5)
    assert served == ["a1", "b1", "b2", "b3", "b4", "a2", "b5"]


def test_a_tenant_that_comes_late_neither_pays_for_the_past_nor_has_saved_up() -> None:
    queue = CompileQueue()
    for n in range(20):
        add(queue, f"a{n}", "a")
    for _ in range(10):
        serve(queue, 2.0)
    for n in range(4):
        add(queue, f"b{n}", "b")
    assert [serve(queue, 2.0)[0] for _ in range(8)] == list("babababa")


def test_no_tenant_gets_a_second_compiler_while_another_waits() -> None:
    queue = CompileQueue()
    for name in ("a1", "a2", "a3"):
        add(queue, name, "a")
    first = queue.take()
    assert name_of(first) == "a1"
    add(queue, "b1", "b")
    second = queue.take()
    assert name_of(second) == "b1"
    assert second is not None
    queue.ended(second, 100.0)
    assert name_of(queue.take()) == "a2", "no other tenant waits"


def test_a_grammar_that_several_tenants_want_is_compiled_at_the_first_turn_of_any() -> None:
    queue = CompileQueue()
    for n in range(3):
        add(queue, f"a{n}", "a")
    common = add(queue, "common", "a")
    queue.add(common, "b")
    assert [serve(queue), serve(queue)] == ["a0", "common"]
    assert common.payer == "b"
    assert len(queue) == 2
    assert [serve(queue), serve(queue)] == ["a1", "a2"]
    assert queue.take() is None


def test_a_removed_compile_is_not_begun() -> None:
    queue = CompileQueue()
    first, _ = add(queue, "a", ""), add(queue, "b", "")
    queue.remove(first, "")
    queue.remove(first, "")
    assert serve(queue) == "b"


def test_the_limits_are_named() -> None:
    queue = CompileQueue(max_pending=3, max_pending_per_tenant=2)
    first = add(queue, "a1", "a")
    add(queue, "a2", "a")
    queue.add(first, "a")  # it waits already
    with pytest.raises(CompileQueueFull, match="the limit of a tenant is 2") as refused:
        add(queue, "a3", "a")
    assert refused.value.is_tenants
    add(queue, "b1", "b")
    with pytest.raises(CompileQueueFull, match="its limit is 3") as refused:
        add(queue, "c1", "c")
    assert not refused.value.is_tenants
    serve(queue)
    add(queue, "c1", "c")


def test_a_compile_knows_which_tenants_still_want_it() -> None:
    compile_ = Compile(StructuredOutput(GrammarKind.REGEX, "a"))
    for request_id, tenant in (("1", "a"), ("2", "a"), ("3", "b")):
        compile_.join(request_id, tenant)
    assert [compile_.leave(request_id) for request_id in ("1", "1", "3", "2")] == [None, None, "b", "a"]
    assert not compile_.is_wanted


class QueueMachine(RuleBasedStateMachine):
    """Two compilers and a few tenants, one of which may compile for long."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = CompileQueue(max_pending=12, max_pending_per_tenant=6)
        self.waiting: list[tuple[Compile, str]] = []
        self.running: list[Compile] = []
        self.num_added = 0

    @rule(tenant=st.sampled_from("abcd"))
    def add(self, tenant: str) -> None:
        self.num_added += 1
        try:
            self.waiting.append((add(self.queue, f"{self.num_added}", tenant), tenant))
        except CompileQueueFull:
            assert len(self.waiting) >= 6

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        compile_, tenant = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(compile_, tenant)

    @precondition(lambda self: len(self.running) < 2)
    @rule()
    def take(self) -> None:
        compile_ = self.queue.take()
        assert (compile_ is None) == (not self.waiting)
        if compile_ is None:
            return
        tenant = compile_.payer
        assert tenant is not None
        others = {name for _, name in self.waiting} - {tenant}
        busy = {running.payer for running in self.running}
        assert tenant not in busy or not others - busy, "another tenant waits for its first compiler"
        assert next(waiting for waiting, name in self.waiting if name == tenant) is compile_, "not the tenant's oldest"
        self.waiting.remove((compile_, tenant))
        self.running.append(compile_)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 1), seconds=st.sampled_from([0.0, 0.01, 2.0]))
    def end(self, index: int, seconds: float) -> None:
        self.queue.ended(self.running.pop(index % len(self.running)), seconds)

    @invariant()
    def adds_up(self) -> None:
        assert len(self.queue) == len(self.waiting)
        live = {name for _, name in self.waiting} | {running.payer for running in self.running}
        assert len(self.queue._turns._used) <= 4
        assert live <= set(self.queue._turns._used)

    def teardown(self) -> None:
        for running in self.running:
            self.queue.ended(running, 1.0)
        assert {name_of(self.queue.take()) for _ in self.waiting} == {name_of(compile_) for compile_, _ in self.waiting}
        assert self.queue.take() is None


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize("num_others", [1, 5])
def test_a_tenant_waits_for_one_turn_of_each_other_tenant_at_most(num_others: int) -> None:
    """However many grammars the others have, and although more come all the time."""
    queue = CompileQueue()
    for n in range(50):
        add(queue, f"{n % num_others}.{n}", f"other {n % num_others}")
    for _ in range(7):
        serve(queue, 2.0)
    add(queue, "mine", "me")
    served = []
    while "mine" not in served:
        served.append(serve(queue, 2.0))
        add(queue, f"{len(served)} more", f"other {len(served) % num_others}")
    assert len(served) <= num_others + 1
