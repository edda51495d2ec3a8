"""``python -m tests.attack [NAME…]``: attacks on a running mesh, each while an innocent stream of another key runs.

Every group of attacks gets a mesh of its own: processes that ``tokenloom serve`` starts. A row of the table shows the
answer to the attack, the longest time between two tokens of the innocent stream, and the gateway's memory before the
attack and its growth. WRONG means that the attack did harm, LATE that only a clock says so: times are valid where
nothing else runs. A NAME selects the attacks whose names begin with it.
"""

import argparse
from collections.abc import Sequence
from itertools import groupby
from types import ModuleType

from tests.attack import (
    bodies,
    browsers,
    connections,
    grammars,
    images,
    shares,
    sounds,
    stalls,
    tenants,
    trailers,
    validators,
    videos,
)
from tests.attack.attack import Attack, Result, run_attack
from tests.attack.canary import running_canary
from tests.attack.target import attacked

FAMILIES: tuple[ModuleType, ...] = (
    trailers,
    validators,
    bodies,
    tenants,
    grammars,
    shares,
    connections,
    browsers,
    stalls,
    images,
    sounds,
    videos,
)


def run_family(attacks: Sequence[Attack]) -> list[Result]:
    """Run attacks one after the other, those that need the same mesh in one; print a row after each."""
    results = []
    for setup, group in groupby(attacks, key=lambda attack: attack.setup):
        with attacked(setup) as target, running_canary(target) as canary:
            for attack in group:
                results.append(run_attack(attack, target, canary))
                print(_row(results[-1]), flush=True)
    return results


def _row(result: Result) -> str:
    memory = f"{result.before:4.0f} + {result.peak - result.before:4.0f} MiB"
    return f"{result.name:<22} {result.outcome.answer:<42} {result.gap * 1e3:6.0f} ms  {memory}  {result.verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all attacks")
    parser.add_argument("--list", action="store_true", help="print the names and what each attack does")
    arguments = parser.parse_args()
    wanted = tuple(arguments.names)
    families = [
        [attack for attack in family.ATTACKS if not wanted or attack.name.startswith(wanted)] for family in FAMILIES
    ]
    if not any(families):
        parser.error(f"no attack has such a name: {' '.join(wanted)}; see --list")
    if arguments.list:
        print("\n".join(attack.name for attacks in families for attack in attacks))
        return
    print(f"{'attack':<22} {'answer':<42} {'canary gap':>10} {'gateway':>15}  verdict")
    results = [result for attacks in families if attacks for result in run_family(attacks)]
    problems = [f"{result.name}: {words}" for result in results for words in result.problems]
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
