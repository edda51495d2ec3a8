"""No regular expression of the product takes more than linear time, whatever it is applied to.

Every expression is found in the source and applied, with the method that the product uses, to texts made of its own
characters: one or two of them repeated, with another one in front or behind.
"""

import ast
import itertools
import re
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from re import _constants as ops  # type: ignore[attr-defined]  # the only way to learn what an expression looks at
from re import _parser
from typing import Any, NamedTuple

import pytest

from tests.linear_time import grows_too_fast
from tests.test_fields_are_read import PRODUCT, ROOT
from tokenloom.services.gateway.openapi import constraints

METHODS = frozenset({"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"})
# Expressions that are put together when the product runs, with an example of the result.
MADE_AT_RUN_TIME = {
    "engine_core/data/kv_groups.py": r"HND/(int8\+fp32|[a-z0-9-]+)/(\d{1,6})x(\d{1,6})(?:@(\d{1,6})\.(\d{1,6}))?",
    "engine_core/data/lora.py": r"(.*\.)?(q_proj)$",
    "engine_core/structured_output/llguidance_backend.py": r"(<\|end\|>|<\|ends\|>|<\|e)",
    "gpu_worker/lora/stored_changes.py": r"(.+?)\.(lora_A\.weight|lora_B\.weight|weight)",
    "tokenloom/request/errors.py": r"(?<!\w)max_tokens(?!\w)",
    "services/engine/core/vllm_server.py": r'[{,]block_size="(\d{1,12})"',
    "services/gateway/formats/call_parser.py": "(⟨id⟩|⟨index⟩)",
    "services/gateway/formats/strict_calls.py": "(⟨id⟩|⟨index⟩)",
    "services/gateway/generation/delivered.py": r"\s*(?:[^\s\u2e80-\uffff]+(?=\s)|[^\s\u2e80-\uffff]*[\u2e80-\uffff])",
    "services/gateway/records/request_ids.py": r"(?:[a-z]+[-_])*([0-9a-f]{40}(?:-[0-9]+)?)(?:_[0-9a-f]{8})?",
    "tokenloom/request/request_records.py": r"requests-0123456789(?:-\d+)?",
    "services/tokenizer/encode_worker.py": r"[A-Za-z](?= [A-Za-z])",
    "services/tokenizer/encoder.py": r"\n(?=[^\W_])|[A-Za-z](?= [A-Za-z])",
    "services/tokenizer/media/media_reader.py": r"(<\|image_pad\|>|<\|video_pad\|>)",
    "services/tokenizer/spelled_tokens.py": r"<(?:\|(?:e(?:nds?)?\|>|\|>)|e>?)",
}
# What expressions of a table are called where they are used.
OF_TABLES = {"VOLATILE_LINES": "line.pattern"}


SMALL, LARGE = 1 << 7, 1 << 12


class Use(NamedTuple):
    """One expression, and one way in which the product applies it."""

    path: str
    pattern: str | bytes
    flags: int
    method: str


def uses() -> Iterator[Use]:
    """Yield every use of a regular expression."""
    for path in PRODUCT:
        source = path.read_text(encoding="utf-8")
        if "import re\n" in source:
            yield from _uses_in(str(path.relative_to(ROOT)), ast.parse(source))
    for pattern in _schema_patterns(vars(constraints)):
        yield Use("services/gateway/openapi/constraints.py", pattern, 0, "search")


def _uses_in(path: str, module: ast.Module) -> Iterator[Use]:
    methods = _methods_by_name(module)
    used = {node.value: node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")):
            continue
        name = ast.unparse(node.func).removeprefix("re.")
        if name not in METHODS and name != "compile":
            continue
        argument = node.args[0]
        pattern = argument.value if isinstance(argument, ast.Constant) else MADE_AT_RUN_TIME[path]
        assert isinstance(pattern, str | bytes)
        flags = sum(_flag(keyword.value) for keyword in node.keywords if keyword.arg == "flags")
        flags += sum(map(_flag, node.args[1:])) if name == "compile" else 0
        if used.get(node) in METHODS:  # re.compile(…).search
            name = str(used[node])
        for method in methods[_target(module, node)] if name == "compile" else [name]:
            yield Use(path, pattern, flags, method)


def _methods_by_name(module: ast.Module) -> dict[str, set[str]]:
    """Return the methods that are called on each name or attribute."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            found.setdefault(ast.unparse(node.value), set()).add(node.attr)
    return found


def _target(module: ast.Module, call: ast.Call) -> str:
    """Return what a compiled expression is assigned to."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(part is call for part in ast.walk(node)):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            return OF_TABLES.get(name, name)
    raise AssertionError(f"a compiled expression has no name: {ast.unparse(call)}")


def _flag(node: ast.expr) -> int:
    return sum(int(re.RegexFlag[name.attr]) for name in ast.walk(node) if isinstance(name, ast.Attribute))


def _schema_patterns(value: Any) -> set[str]:
    """Return each ``pattern`` of JSON schemas."""
    found: set[str] = set()
    if isinstance(value, dict):
        if isinstance(value.get("pattern"), str):
            found.add(value["pattern"])
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            found |= _schema_patterns(part)
    return found


@cache
def alphabet(pattern: str | bytes, flags: int) -> tuple[str, ...]:
    """Return characters that the expression distinguishes: of the signs in its source, and of one or two of each class,
    one for each combination of places that take it."""
    source = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    every = dict.fromkeys([*"a1 \n", *(char for char in source if not char.isalnum())])
    places = list(_places(_parser.parse(pattern, flags)))
    if any(op is ops.GROUPREF for op, _ in places):  # which compares characters with each other
        return tuple(every)
    # In both cases, because the expression may ignore them.
    alike = {tuple(_takes(place, char + char.swapcase()) for place in [*places, *_EDGES]): char for char in every}
    return tuple(alike.values())


_CATEGORIES = {ops.CATEGORY_DIGIT: r"\d", ops.CATEGORY_SPACE: r"\s", ops.CATEGORY_WORD: r"\w"}
_CATEGORIES |= {ops.CATEGORY_NOT_DIGIT: r"\D", ops.CATEGORY_NOT_SPACE: r"\S", ops.CATEGORY_NOT_WORD: r"\W"}
_EDGES = ((ops.CATEGORY, ops.CATEGORY_WORD), (ops.LITERAL, ord("\n")))
"""What the edges of words and of lines look at, and ``.``."""


def _places(parts: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a parsed expression that look at a character."""
    for op, argument in parts:
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.GROUPREF):
            yield op, argument
        elif op not in (ops.ANY, ops.AT):
            inner = argument if isinstance(argument, tuple | list) else (argument,)
            for each in itertools.chain.from_iterable(part if isinstance(part, list) else (part,) for part in inner):
                if isinstance(each, _parser.SubPattern):
                    yield from _places(each)


def _takes(place: tuple[Any, Any], chars: str) -> tuple[bool, ...]:
    return tuple(_takes_one(place, char) for char in chars)


def _takes_one(place: tuple[Any, Any], char: str) -> bool:
    op, argument = place
    if op is ops.IN:
        is_in = any(_takes_one(part, char) for part in argument if part[0] is not ops.NEGATE)
        return is_in != (argument[0][0] is ops.NEGATE)
    if op is ops.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    if op is ops.CATEGORY:
        return re.fullmatch(_CATEGORIES[argument], char) is not None
    return (ord(char) == argument) != (op is ops.NOT_LITERAL)


def inputs(pattern: str | bytes, flags: int) -> Iterator[tuple[str, str, str]]:
    """Yield what stands before, is repeated, and stands behind."""
    chars = alphabet(pattern, flags)
    for first, second in itertools.product(chars, repeat=2):
        yield "", first + second, "\0"
        yield first, second, "\0"
        yield "", first, second


def too_slow(use: Use, at_least: int | None = None) -> list[tuple[str, str, str]]:
    """Return inputs for which an expression takes more than linear time: all, or the first ones of that number."""
    compiled = re.compile(use.pattern, use.flags)
    is_bytes = isinstance(use.pattern, bytes)

    def applied(before: str, unit: str, behind: str, size: int) -> object:
        text = before + unit * (size // len(unit)) + behind
        value: Any = text.encode("latin-1") if is_bytes else text
        if use.method in ("sub", "subn"):
            return getattr(compiled, use.method)(b"" if is_bytes else "", value)
        result = getattr(compiled, use.method)(value)
        return deque(result, 0) if use.method == "finditer" else result

    every = inputs(use.pattern, use.flags)
    found = (parts for parts in every if grows_too_fast(partial(applied, *parts), SMALL, LARGE))
    return list(itertools.islice(found, at_least))


@pytest.mark.parametrize("use", sorted(set(uses()), key=repr), ids=lambda use: f"{use.path}-{use.method}")
def test_every_expression_takes_linear_time(use: Use) -> None:
    assert not too_slow(use)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r'"(?:[^"\\]|\\.)*"', "sub"),
        (r"(a+)+$", "match"),
        (r"(?:ab?|a)*$", "fullmatch"),
        (r"\s*\s*x", "match"),
    ],
)
def test_the_search_finds_expressions_that_take_more(pattern: str, method: str) -> None:
    """The first one was applied to JSON schemas, where 32 KB took 5 s; the next two take exponential time."""
    assert too_slow(Use("", pattern, 0, method), at_least=1)
