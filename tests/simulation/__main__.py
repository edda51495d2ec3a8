"""``python -m tests.simulation``: runs many seeds and reports what was violated."""

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from .bugs import BUGS, reintroduced
from .faults import KINDS
from .runner import Result, run_seed

_SEEDS_OF_A_PROCESS = 500
_SHOWN = 6
"""Violations of one seed that are printed."""


def main() -> int:
    arguments = _parse()
    logging.disable(logging.CRITICAL)
    if arguments.bug:
        return _hunt(arguments)
    started = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    lies: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    violated: list[int] = []
    num_migrations, migrations, pauses = 0, Counter[str](), list[float]()
    copies: Counter[str] = Counter()
    for seed, result in zip(seeds, _results(seeds, arguments), strict=True):
        outcomes += result.outcomes
        faults.update(fault.kind for fault in result.happened)
        lies += result.lies
        moves += result.moves
        num_migrations += result.num_migrations
        migrations += result.migrations
        copies += result.copies_used
        pauses += result.pauses
        if result.violations:
            violated.append(seed)
        if result.violations or arguments.verbose:
            _show(result)
    seconds = time.monotonic() - started
    print(f"{len(seeds)} seeds in {seconds:.1f} s ({len(seeds) / seconds * 60:.0f} a minute)")
    print("requests:", *(f"{count:8} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    print("faults:", *(f"{count:8} {kind}" for kind, count in faults.most_common()), sep="\n")
    print(*(f"{count:8} lies: {kind}" for kind, count in lies.most_common()), sep="\n", end="\n" if lies else "")
    print(*(f"{count:8} {kind}" for kind, count in moves.most_common()), sep="\n", end="\n" if moves else "")
    print(f"requests moved: {num_migrations}", *(f"{count:8} by {why}" for why, count in migrations.items()), sep="\n")
    print(
        *(f"{count:8} copies {outcome}" for outcome, count in copies.most_common()),
        sep="\n",
        end="\n" if copies else "",
    )
    if pauses:
        ranked = sorted(round(each * 1000) for each in pauses)
        p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
        print(f"{len(ranked)} pauses of moves, faults and steps of 10 to 30 ms included: p50 {p50} ms, p99 {p99} ms")
    print(f"violated: {violated or 'none'}")
    return 1 if violated else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (1)")
    parser.add_argument("--faults", nargs="+", choices=KINDS, default=KINDS, help="faults that may happen (all)")
    parser.add_argument("--bug", choices=BUGS, help="put a bug back, and run until a seed finds it")
    parser.add_argument("--standby", action="store_true", help="run two coordinators, and kill them at any time")
    parser.add_argument("--administered", action="store_true", help="pause the mesh and put it to sleep meanwhile")
    parser.add_argument("--chats", action="store_true", help="send chats and grammars, and kill what handles them")
    parser.add_argument("--states", action="store_true", help="serve a model that keeps a state")
    parser.add_argument("--images", action="store_true", help="send images, and kill what encodes them")
    parser.add_argument("--liars", action="store_true", help="let parts send invalid messages")
    parser.add_argument("--movers", action="store_true", help="let clients repeat their requests at other gateways")
    parser.add_argument("--migrations", action="store_true", help="move running requests from engine to engine")
    parser.add_argument("--together", action="store_true", help="kill parts of several kinds in the same instant")
    parser.add_argument("--stutters", action="store_true", help="stop and continue every part again and again")
    parser.add_argument("--verbose", action="store_true", help="print a line for each seed")
    return parser.parse_args()


def _hunt(arguments: argparse.Namespace) -> int:
    """Run seeds with a bug until one of them finds it."""
    for number, seed in enumerate(range(arguments.first, arguments.first + arguments.seeds), 1):
        with reintroduced(arguments.bug):
            result = run_seed(
                seed,
                tuple(arguments.faults),
                has_standby=arguments.standby,
                is_administered=arguments.administered,
                has_chats=arguments.chats,
                has_states=arguments.states,
                has_images=arguments.images,
                has_liars=arguments.liars,
                has_movers=arguments.movers,
                has_migrations=arguments.migrations,
                has_losses_together=arguments.together,
                has_stutters=arguments.stutters,
            )
        if result.violations:
            _show(result)
            print(f"{arguments.bug} was found by seed {seed}, the {number}. one")
            return 0
    print(f"{arguments.bug} was not found within {arguments.seeds} seeds")
    return 1


def _results(seeds: Sequence[int], arguments: argparse.Namespace) -> Iterator[Result]:
    kinds, jobs = tuple(arguments.faults), arguments.jobs
    run = partial(
        run_seed,
        kinds=kinds,
        has_standby=arguments.standby,
        is_administered=arguments.administered,
        has_chats=arguments.chats,
        has_states=arguments.states,
        has_images=arguments.images,
        has_liars=arguments.liars,
        has_movers=arguments.movers,
        has_migrations=arguments.migrations,
        has_losses_together=arguments.together,
        has_stutters=arguments.stutters,
    )
    if jobs == 1:
        yield from map(run, seeds)
        return
    run(seeds[0])  # what every seed loads is loaded before the processes begin
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=_SEEDS_OF_A_PROCESS) as pool:
        yield from pool.imap(run, seeds)


def _show(result: Result) -> None:
    plan = result.plan
    print(
        f"seed {plan.seed}: {' '.join(plan.roles)}, {result.seconds:.1f} s, {result.num_frames} frames, {result.trace}"
    )
    for fault in result.happened:
        print(f"    {fault}")
    for violation in result.violations[:_SHOWN]:
        print(f"  ! {violation}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
