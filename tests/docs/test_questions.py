"""The ten questions of ``structures.md``: every ``file:symbol`` is there, and the answers take few files."""

import ast
import re
from pathlib import Path

import pytest

from .markdown_page import DOCS, ROOT

MOST_FILES = 30
"""Files to open for all ten questions together; one that answers two of them counts twice."""
_SYMBOL = re.compile(r"`([\w/]+\.(?:py|proto)):([\w.]+)`")
_PAGE = (DOCS / "understand" / "structures.md").read_text()
QUESTIONS = [
    (cells[1].strip(), _SYMBOL.findall(line))
    for line in _PAGE.partition("\n## Ten questions\n")[2].splitlines()
    if line.startswith("|") and (cells := line.split("|")) and cells[1].strip().endswith("?")
]


def resolves(path: Path, symbol: str) -> bool:
    """Return whether a file of Python or a proto file defines ``Class.method``, ``function`` or ``Message``."""
    if not path.is_file():
        return False
    if path.suffix == ".proto":
        return re.search(rf"^(message|enum|service) {symbol} ", path.read_text(), re.MULTILINE) is not None
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in symbol.split("."):
        found = [node for node in body if _defines(node, name)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def test_there_are_ten_questions_with_an_answer_each() -> None:
    assert len(QUESTIONS) == 10
    assert all(symbols for _, symbols in QUESTIONS)


@pytest.mark.parametrize(("question", "symbols"), QUESTIONS, ids=[question for question, _ in QUESTIONS])
def test_every_symbol_of_an_answer_is_there(question: str, symbols: list[tuple[str, str]]) -> None:
    assert [f"{path}:{symbol}" for path, symbol in symbols if not resolves(ROOT / path, symbol)] == []


def test_the_answers_take_few_files() -> None:
    assert sum(len({path for path, _ in symbols}) for _, symbols in QUESTIONS) <= MOST_FILES


@pytest.mark.parametrize("symbol", ["Nothing", "ModelConfig.nothing"])
def test_a_symbol_that_is_not_there_is_found(symbol: str) -> None:
    assert not resolves(ROOT / "gpu_worker/checkpoint/model_config.py", symbol)
