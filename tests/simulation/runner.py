"""Runs one seed from the start of its mesh to the check of everything that is left."""

import asyncio
import functools
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from tokenloom.services.coordinator.engines import rebalancing
from tokenloom.services.engine.records.engine_metrics import KVMetrics
from tokenloom.services.output_processor.request.request_stages import RequestStages

from .administration import Mover, Operator, with_administration
from .faults import KINDS, inject
from .invariants import check_answers, check_idle_mesh
from .load import Answer, Client
from .mesh import Mesh
from .network import Network
from .plan import (
    Ask,
    Fault,
    Plan,
    make_plan,
    with_chats,
    with_images,
    with_liars,
    with_losses_together,
    with_migrations,
    with_movers,
    with_standby,
    with_states,
    with_stutters,
)
from .virtual_loop import VirtualLoop


@dataclass
class Result:
    """Reports one run.

    Attributes:
        violations: What must not have happened; empty after a good run.
        happened: The faults of the plan that happened.
        outcomes: How many requests ended how.
        lies: How many messages were lies, by their types.
        moves: How often clients left gateways, and how often an earlier call took the answer of a later one.
        num_migrations: How often an operator moved an output to another engine.
        migrations: How many outputs left an engine for another one, by why.
        copies_used: What became of copies of requests at second output processors.
        pauses: Seconds between the last token of one engine and the first one of the next, for outputs that moved.
        trace: Hash of every write of the run.
        seconds: Virtual seconds of the run.
    """

    plan: Plan
    violations: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    happened: list[Fault] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    lies: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    num_migrations: int = 0
    migrations: Counter[str] = field(default_factory=Counter)
    copies_used: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    trace: str = ""
    num_frames: int = 0
    seconds: float = 0.0


def run_seed(
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    *,
    has_standby: bool = False,
    is_administered: bool = False,
    has_chats: bool = False,
    has_states: bool = False,
    has_images: bool = False,
    has_liars: bool = False,
    has_movers: bool = False,
    has_migrations: bool = False,
    has_losses_together: bool = False,
    has_stutters: bool = False,
) -> Result:
    """Run the plan of a seed. ``kinds``: the faults that may happen. ``has_standby``: with a second coordinator.
    ``is_administered``: with calls of an operator. ``has_chats``: with chats, which tokenizers render. ``has_states``:
    with a model that keeps a state. ``has_images``: with images, which encoders turn into rows.
    ``has_liars``: with parts that send invalid messages. ``has_movers``: with clients that leave slow gateways.
    ``has_migrations``: with requests that go on at other engines while they run. ``has_losses_together``: with parts of
    several kinds that are killed in the same instant, and nothing else. ``has_stutters``: with parts that are all
    stopped and continued again and again."""
    plan = make_plan(seed, kinds)
    plan = with_states(plan) if has_states else plan
    plan = with_migrations(plan) if has_migrations else plan
    plan = with_administration(plan) if is_administered else plan
    plan = with_chats(plan) if has_chats else plan
    plan = with_images(plan) if has_images else plan
    plan = with_liars(plan) if has_liars else plan
    plan = with_movers(plan) if has_movers else plan
    plan = with_losses_together(plan) if has_losses_together else plan
    plan = with_stutters(plan) if has_stutters else plan
    return run_plan(with_standby(plan) if has_standby else plan)


Course = Callable[[Network, Plan, Result], Coroutine[Any, Any, None]]
"""What happens in a run; it adds to the result."""


def run_plan(plan: Plan, on_idle: Callable[[], object] = lambda: None, course: "Course | None" = None) -> Result:
    """Run a plan. ``on_idle`` is called when all requests have ended, while the mesh still runs. ``course``: happens in
    place of :func:`simulate`.

    The garbage collector waits until the end: it would end the tasks of dead processes. Then it looks only at what the
    run has made.
    """
    result = Result(plan)
    gc.freeze()
    gc.disable()
    with _reported(result), _hasty(result):
        loop = _run_plan(plan, result, course or functools.partial(simulate, on_idle=on_idle))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what ends in the middle never awaits its last calls
            loop.close()
            del loop
            gc.collect()
    gc.enable()
    return result


@contextmanager
def _reported(result: Result) -> Iterator[None]:
    """Report what Python cannot raise. When the run is over, tasks that never ended are dropped, and some protest."""
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not result.trace:
            result.violations.append(f"not raised: {unraisable.exc_value!r} in {unraisable.object!r}")

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def _hasty(result: Result) -> Iterator[None]:
    """Rebalance within the few seconds of a run, and measure what moves."""
    last = WeakKeyDictionary[RequestStages, tuple[float, int]]()
    take = RequestStages.on_tokens

    def observe_move(_: KVMetrics, why: str) -> None:
        result.migrations[why] += 1

    def on_tokens(stages: RequestStages, *tokens: Any) -> None:
        now, num_moves = asyncio.get_running_loop().time(), stages._output.timeline.moves
        before, moved = last.get(stages, (now, num_moves))
        if num_moves > moved:
            result.pauses.append(now - before)
        last[stages] = now, num_moves
        take(stages, *tokens)

    seconds = {"HOT_SECONDS": 0.2, "APART_SECONDS": 0.1, "REST_SECONDS": 1.0}
    with (
        patch.multiple(rebalancing, MARGIN=2, **seconds),
        patch.object(KVMetrics, "observe_move", observe_move),
        patch.object(RequestStages, "on_tokens", on_tokens),
    ):
        yield


def _run_plan(plan: Plan, result: Result, course: Course) -> VirtualLoop:
    loop = VirtualLoop()
    network = Network(loop, Random(f"network {plan.seed}"), plan.mean_delay)
    began_at = loop.time()
    try:
        loop.run(course(network, plan, result))
    except Exception as error:
        result.violations.append(f"the run ended with {error!r}")
    result.violations += loop.failures
    result.seconds = loop.time() - began_at
    result.trace, result.num_frames = network.trace(), network.num_frames
    result.lies = network.lies.told
    return loop


async def simulate(network: Network, plan: Plan, result: Result, on_idle: Callable[[], object] = lambda: None) -> None:
    """Run a plan in the event loop of ``network``, which runs already, and add what happens to ``result``."""
    mesh = Mesh(network, plan)
    await mesh.start()
    clients = [Client(mesh, ask) for ask in plan.asks]
    result.answers = [client.answer for client in clients]
    mover, operator = Mover(mesh), Operator(mesh)
    moving = asyncio.get_running_loop().create_task(mover.run()) if plan.migrates else None
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(_send(client, client.answer.ask))
        for fault in plan.faults:
            group.create_task(inject(mesh, fault, result.happened))
        group.create_task(operator.run())
    if moving is not None:
        moving.cancel()
    result.num_migrations = mover.moved
    result.copies_used = mesh.copies_used
    result.violations += operator.violations
    result.outcomes.update(map(_outcome, result.answers))
    for answer in result.answers:
        result.moves += Counter({"gateways left": answer.num_moves, "answers taken": answer.num_taken})
    result.violations += check_answers(result.answers, mesh, result.happened)
    result.violations += await check_idle_mesh(mesh)
    result.violations += [failure for part in mesh.parts.values() for failure in part.failures]
    on_idle()


async def _send(client: Client, ask: Ask) -> None:
    await asyncio.sleep(ask.at)
    await client.run()


def _outcome(answer: Answer) -> str:
    if answer.is_complete:
        return "complete"
    if answer.was_cancelled:
        return "cancelled"
    if answer.lost_gateway:
        return "gateway lost"
    return repr(answer.error or answer.bug)
