"""The cells of the matrix: each pair of features is tried, and what it gave is kept in a file."""

import json
import random
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from .features import FEATURES, Seen, Task, nonsense, shapes_model
from .mesh import Answers, Mesh, Refused, equal
from .model_files import ModelFiles

Verdict = Literal["equal", "refused", "apart", "not written", "wrong"]
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Cell:
    """What a pair of features gave."""

    first: str
    second: str
    verdict: Verdict
    """apart: no mesh could have both. not written: no program here writes such a model. wrong: neither the same answers
    nor a refusal, or a feature that did not act."""
    reason: str = ""


def pairs() -> list[tuple[str, str]]:
    """Return all pairs in the order of the features."""
    return list(combinations(FEATURES, 2))


def sample(seed: int, count: int, cells: Sequence[Cell]) -> list[Cell]:
    """Return some of the cells that start a mesh."""
    tried = [cell for cell in cells if cell.verdict in ("equal", "refused")]
    return random.Random(seed).sample(tried, min(count, len(tried)))


class Matrix:
    """Tries cells. Answers that several cells are compared with are computed once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "models").mkdir(exist_ok=True)
        self._files = ModelFiles(directory / "models")
        self._expected: dict[tuple[Task, tuple[str, ...], tuple[str, ...]], Answers] = {}

    def cell(self, first: str, second: str) -> Cell:
        """Try a pair."""
        if reason := nonsense(first, second):
            return Cell(first, second, "apart", reason)
        try:
            return Cell(first, second, *self._tried((first, second)))
        except KeyError as error:
            return Cell(first, second, "not written", f"no {error.args[0]} of this model is written")
        except Exception as error:  # the cell says what went wrong, and the others are tried
            return Cell(first, second, "wrong", "".join(traceback.format_exception_only(error)).strip()[-1500:])

    def _tried(self, names: tuple[str, str]) -> tuple[Verdict, str]:
        task: Task = "vectors" if any(FEATURES[name].task == "vectors" for name in names) else "tokens"
        try:
            found, seen = self._ask(names, task)
        except Refused as refusal:
            return "refused", str(refusal)
        expected = self._reference(names, task)
        if not all(map(equal, found, expected)):
            return "wrong", f"answers {found} instead of {expected}"
        for name in names:
            feature = FEATURES[name]
            without = self._reference(tuple(each for each in names if each != name), task, of=names)
            other = not all(map(equal, found, without))
            if not feature.acted(seen._replace(is_other_than_without=other)):
                return "wrong", f"{name} did not act: {feature.proof}"
        return "equal", ""

    def _reference(self, names: Sequence[str], task: Task, of: Sequence[str] = ()) -> Answers:
        """Return the answers of one engine with the features that change answers, over the plain weights of ``of``."""
        of = of or names
        changing = {name for name in names if FEATURES[name].changes_answers}
        # Prompts show images, and without pooling a mesh of a decoder has no vectors to compare with.
        changing |= {"images", "pooling"} & {*of}
        kept = tuple(name for name in FEATURES if name in changing)
        models = tuple(name for name in FEATURES if name in of and shapes_model(FEATURES[name]))
        if (key := (task, kept, models)) not in self._expected:
            self._expected[key] = self._ask(kept, task, models)[0]
        return self._expected[key]

    def _ask(self, names: Sequence[str], task: Task, plain: Sequence[str] | None = None) -> tuple[Answers, Seen]:
        """``plain``: the features whose model is served, as floats; None: that of ``names``, as it is stored."""
        with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
            mesh = Mesh(names, self._files, Path(directory) / "mesh", plain=plain)
            try:
                return mesh.answers(task)
            finally:
                mesh.close()


def read(path: Path = RESULTS) -> list[Cell]:
    """Return the cells of a file; none if there is none."""
    return [Cell(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def write(cells: Sequence[Cell], path: Path = RESULTS) -> None:
    """Write the cells in the order of the features."""
    order = {pair: index for index, pair in enumerate(pairs())}
    ordered = sorted(cells, key=lambda cell: order[cell.first, cell.second])
    path.write_text(json.dumps([asdict(cell) for cell in ordered], indent=1) + "\n")


def missing(cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that no cell is of."""
    known = {(cell.first, cell.second) for cell in cells}
    return (pair for pair in pairs() if pair not in known)
