"""Writes ``docs/reference/combinations.md`` from the cells."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .cells import Cell
from .features import FEATURES

PAGE = Path(__file__).parents[2] / "docs/reference/combinations.md"
_SIGNS = {"equal": "=", "refused": "r", "apart": "·", "not written": "?", "wrong": "**!**"}
_HEAD = """# Features together

`make matrix` starts a mesh for each pair of these features, asks it for the same prompts twice, the second time from
the prefix cache, and compares the answers with those of one engine without them in float32. This page is its result;
no cell is written by hand (`tests/matrix`).

- **=**: the same tokens, or vectors, and both features acted. Under [Proofs](#proofs) stands how that is seen.
- **r**: refused at the start or with status 400. The reasons stand under [Refused](#refused).
- **·**: one or the other; no mesh could have both. **?**: no program here writes such a model.
- **!**: a fault, under the heading Faults. An empty field: the pair was not tried yet.
"""


def page(cells: Sequence[Cell]) -> str:
    """Return the page's text."""
    by_pair = {(cell.first, cell.second): cell for cell in cells}
    counts = Counter(cell.verdict for cell in cells)
    names = list(FEATURES)
    lines = [
        _HEAD,
        f"Of {len(names) * (len(names) - 1) // 2} pairs {len(cells)} were tried: {counts['equal']} give the same "
        f"answers, {counts['refused']} are refused, {counts['apart']} are one or the other, {counts['not written']} "
        f"have no model, {counts['wrong']} are faults.",
        "",
        f"| | {' | '.join(str(number) for number in range(1, len(names)))} |",
        f"|---{'|---' * (len(names) - 1)}|",
    ]
    for row, name in enumerate(names[1:], 1):
        signs = [_sign(by_pair.get((other, name))) for other in names[:row]]
        lines.append(f"| {row + 1} {name} | {' | '.join(signs + [''] * (len(names) - 1 - row))} |")
    lines += ["", f"1 is {names[0]}.", ""]
    lines += _listed("Refused", [cell for cell in cells if cell.verdict == "refused"])
    lines += _listed("Faults", [cell for cell in cells if cell.verdict == "wrong"])
    lines += ["## Proofs", "", "| feature | flags | that it acted |", "|---|---|---|"]
    for name, feature in FEATURES.items():
        flags = " ".join(feature.flags).replace("|", "\\|")
        lines.append(f"| {name} | {f'`{flags}`' if flags else ''} | {feature.proof} |")
    return "\n".join(lines) + "\n"


def _sign(cell: Cell | None) -> str:
    return "" if cell is None else _SIGNS[cell.verdict]


def _listed(title: str, cells: Sequence[Cell]) -> list[str]:
    """Return a part of the page that gives the reason of each cell, those of equal reasons together."""
    if not cells:
        return []
    by_reason: dict[str, list[Cell]] = {}
    for cell in cells:
        by_reason.setdefault(" ".join(cell.reason.replace("|", "\\|").replace("<", "&lt;").split())[:300], []).append(
            cell
        )
    lines = [f"## {title}", ""]
    for reason, found in by_reason.items():
        lines += [f"- {'; '.join(f'{cell.first} and {cell.second}' for cell in found)}: {reason}"]
    return [*lines, ""]
