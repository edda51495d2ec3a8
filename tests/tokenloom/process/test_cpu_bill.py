"""CPU time is shared out by work, and nothing of it is lost."""

import os
import random
import subprocess
import sys
import threading

import pytest

from tokenloom.process.cpu_bill import MAX_TENANTS, OTHER, OVERHEAD, CpuAccount, CpuBill, ProcessCpu

MS = 1_000_000


class Machine:
    """A clock and a counter of CPU time that tests set."""

    def __init__(self) -> None:
        self.now = self.cpu = 0

    def run(self, busy_ms: int, elapsed_ms: int | None = None) -> None:
        self.cpu += busy_ms * MS
        self.now += (busy_ms if elapsed_ms is None else elapsed_ms) * MS

    def bill(self) -> CpuBill:
        return CpuBill(lambda: self.cpu, lambda: self.now)


class Work:
    """A request whose units a test counts."""

    def __init__(self, units: float = 1.0) -> None:
        self.units = units

    def __call__(self) -> float:
        return self.units


def test_requests_pay_by_their_work_and_the_start_is_overhead() -> None:
    machine = Machine()
    bill = machine.bill()
    machine.run(500)
    works = Work(10), Work(30)
    accounts = [bill.open(tenant, work) for tenant, work in zip("ab", works, strict=True)]
    machine.run(80)
    assert bill.totals() == {OVERHEAD: 500 * MS, "a": 20 * MS, "b": 60 * MS}
    works[0].units += 5
    machine.run(60)
    assert accounts[0].close() == 80 * MS, "only its work since then counts"
    assert accounts[1].close() == 60 * MS
    assert accounts[0].close() == 80 * MS
    assert bill.totals() == {OVERHEAD: 500 * MS, "a": 80 * MS, "b": 60 * MS}


def test_the_last_request_pays_what_is_left_and_idle_times_are_overhead() -> None:
    machine = Machine()
    bill = machine.bill()
    account = bill.open("a", Work())
    machine.run(7)
    assert account.charge() == 7 * MS
    machine.run(5)
    assert account.charge() == 7 * MS, "it waits for some work"
    assert account.close() == 7 * MS
    machine.run(1)
    assert bill.totals() == {OVERHEAD: 6 * MS, "a": 7 * MS}


def test_what_came_a_moment_before_a_request_is_paid_by_it() -> None:
    machine = Machine()
    bill = machine.bill()
    machine.run(500)
    bill.open("a", Work()).close()
    machine.run(3, 300)
    account = bill.open("b", Work())
    machine.run(2)
    assert account.close() == 5 * MS, "its arrival, and the end of the one before"
    machine.run(3, 700)
    assert bill.open("c", Work()).close() == 0
    assert bill.totals() == {OVERHEAD: 503 * MS, "a": 0, "b": 5 * MS, "c": 0}


def test_a_request_that_ends_between_settlements_pays_the_last_price() -> None:
    machine = Machine()
    bill = machine.bill()
    slow = Work(10)
    accounts = [bill.open("a", slow), bill.open("b", Work(10))]
    machine.run(100)
    bill.settle()
    machine.run(1)
    brief = bill.open("c", Work(2))
    assert brief.close() == 1 * MS, "no more than there is: 2 units would cost 10 ms"
    machine.run(20)
    brief = bill.open("c", Work(2))
    assert brief.close() == 10 * MS
    slow.units += 1
    machine.run(60)
    bill.settle()
    assert accounts[0].spent_ns == (50 + 70) * MS
    assert bill.totals() == {OVERHEAD: 0, "a": 120 * MS, "b": 50 * MS, "c": 11 * MS}


def test_what_an_idle_process_takes_is_overhead_while_requests_live_too() -> None:
    machine = Machine()
    bill = machine.bill()
    machine.run(3000, 3000)
    bill.open("a", Work()).close()
    for _ in range(4):
        machine.run(3, 300)
        bill.settle()
    account = bill.open("a", Work())
    machine.run(50, 1000)
    assert account.close() == 40 * MS, "1 % of the second is overhead"
    assert bill.totals() == {OVERHEAD: 3022 * MS, "a": 40 * MS}


def test_calls_without_accounts_pay_by_tenant() -> None:
    machine = Machine()
    bill = machine.bill()
    bill.add("a", 1)
    bill.add("b", 2)
    bill.add("b", 1)
    machine.run(40)
    assert bill.totals() == {OVERHEAD: 0, "a": 10 * MS, "b": 30 * MS}
    machine.run(5)
    assert bill.totals()[OVERHEAD] == 5 * MS


def test_many_tenants_are_billed_together_from_a_limit_on() -> None:
    machine = Machine()
    bill = machine.bill()
    for number in range(MAX_TENANTS + 3):
        account = bill.open(str(number), Work())
        machine.run(1)
        account.close()
    totals = bill.totals()
    assert len(totals) == MAX_TENANTS + 2
    assert totals[OTHER] == 3 * MS


def test_work_that_begins_anew_costs_nothing_back() -> None:
    machine = Machine()
    bill = machine.bill()
    work = Work(10)
    account = bill.open("a", work)
    machine.run(10)
    bill.settle()
    work.units = 2
    machine.run(10)
    bill.settle()
    work.units = 3
    assert account.close() == 20 * MS


@pytest.mark.parametrize("seed", range(20))
def test_all_shares_together_are_the_time(seed: int) -> None:
    rng, machine = random.Random(seed), Machine()
    bill = machine.bill()
    live: list[tuple[CpuAccount, Work]] = []
    by_tenant: dict[str, int] = {}
    for _ in range(400):
        machine.run(rng.randrange(30), rng.randrange(200))
        match rng.randrange(5):
            case 0:
                work = Work(rng.random())
                live.append((bill.open(rng.choice("abc"), work), work))
            case 1 if live:
                account, _ = live.pop(rng.randrange(len(live)))
                spent = account.close()
                by_tenant[account.tenant] = by_tenant.get(account.tenant, 0) + spent
            case 2:
                bill.settle()
            case _ if live:
                rng.choice(live)[1].units += rng.random()
    for account, _ in live:
        by_tenant[account.tenant] = by_tenant.get(account.tenant, 0) + account.close()
    totals = bill.totals()
    assert sum(totals.values()) == machine.cpu, "to the nanosecond"
    del totals[OVERHEAD]
    assert totals == {tenant: spent for tenant, spent in by_tenant.items() if spent or tenant in totals}


def test_threads_may_scrape_while_requests_come_and_go() -> None:
    bill = CpuBill(ProcessCpu().read)
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            bill.totals()

    thread = threading.Thread(target=scrape)
    thread.start()
    for _ in range(2000):
        bill.open("a", Work()).close()
    stop.set()
    thread.join()
    assert bill.totals()["a"] > 0


def _burn(seconds: float) -> "subprocess.Popen[str]":
    """Start a process that says when it has used so much CPU time, and waits for the end of its input."""
    code = f"import sys,time\nwhile time.process_time() < {seconds}: pass\nprint(flush=True); sys.stdin.read()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the children of a process")
def test_children_count_while_they_live_and_when_they_have_ended() -> None:
    now = 0
    cpu = ProcessCpu(now=lambda: now)
    before = cpu.read()
    with _burn(0.3) as child:
        assert child.stdout is not None
        child.stdout.readline()
        now += 10**9  # the children are listed anew
        assert cpu.read() - before >= 300 * MS
        apart = ProcessCpu(lambda: child.pid)
        assert apart.read() <= cpu.read() - 250 * MS
    assert cpu.read() - before >= 300 * MS
    assert ProcessCpu().read() - before >= 300 * MS
    assert os.getpid() not in cpu._children
