"""Runs the command line of ``tools/house.py``."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .editor import Editor, PyrightMissingError, open_editor
from .gates import gates
from .hop_count import HopCount, count_on_mesh
from .imports import study
from .mesh_run import MeshRunError
from .parameters import find_parameters
from .report import House, write_report
from .rooms import study_rooms
from .sizes import measure
from .source_tree import SourceTree

_NOT_ASKED = "left out on the command line."


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, or check it. Returns the exit status: 0, 1 when a figure is beyond its limit, or 2 when the
    folder holds no product."""
    options = _options().parse_args(arguments)
    tree = SourceTree(options.tree)
    if not tree.product:
        sys.stderr.write(f"{tree.root} has no folder of the product; name a checkout with --tree.\n")
        return 2
    house = House(
        sizes=measure(tree),
        parameters=find_parameters(tree),
        imports=study(tree.package),
        rooms=study_rooms(tree.product),
        hops=_hops(tree) if options.hops else _NOT_ASKED,
        editor=_editor(tree) if options.pyright else _NOT_ASKED,
    )
    if options.check:
        return _check(house)
    sys.stdout.write(write_report(house))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(house), indent=2) + "\n")
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/house.py", description="Print figures about the source tree.")
    default = Path(__file__).parents[2]
    parser.add_argument("--tree", type=Path, default=default, metavar="DIR", help="the checkout; this one by default")
    parser.add_argument("--check", action="store_true", help="print only the figures that have limits, and check them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, with all names, to FILE")
    parser.add_argument(
        "--hops",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start a mesh with DIR/.venv and count the calls of a chat request",
    )
    parser.add_argument(
        "--pyright",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run pyright; takes minutes",
    )
    return parser


def _check(house: House) -> int:
    found = list(gates(house))
    sys.stdout.write("".join(f"{gate}\n" for gate in found))
    if isinstance(house.hops, str) and house.hops != _NOT_ASKED:
        sys.stdout.write(f"FAIL the hops were not counted: {house.hops}\n")
        return 1
    return 0 if all(gate.is_kept for gate in found) else 1


def _hops(tree: SourceTree) -> HopCount | str:
    try:
        return count_on_mesh(tree)
    except MeshRunError as error:
        return str(error)


def _editor(tree: SourceTree) -> Editor | str:
    try:
        return open_editor(tree.root)
    except PyrightMissingError as error:
        return str(error)
