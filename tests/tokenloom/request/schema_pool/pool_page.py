"""What becomes of a pool of schemas that libraries write: ``python -m tests.tokenloom.request.schema_pool.pool_page``
writes docs/reference/schemas.md.

``pool.jsonl`` was made by the four programs beside this one, each with its library in an environment of its own:
make_pydantic.py, make_zod.mjs, make_mcp.py and make_openapi.py, in this order.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError
from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend
from tokenloom.request.json_schema import fitted

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "docs" / "reference" / "schemas.md"
POOL = Path(__file__).with_name("pool.jsonl")
_VOCABULARY = 4096
_HEAD = """# JSON schemas

`python -m tests.tokenloom.request.schema_pool.pool_page` writes this page, and a test compares it with what the code
does. A schema of `response_format`, `structured_outputs` or a forced tool is *accepted* when all of it binds the
output; it is *relaxed* when keywords that no grammar expresses are left out and named in the header
`x-tokenloom-ignored` (with `strict: true` such a schema is refused, with keyword and path); it is *refused* with 400
when it cannot be compiled. A relaxed schema admits every document that the schema admits. An unknown `format` is an
annotation and is not named.

The pool has {count} schemas, as pydantic, zod, servers of the Model Context Protocol and documents of OpenAPI write
them (`tests/tokenloom/request/schema_pool`), and was compiled with llguidance.

| from | schemas | accepted | relaxed | refused |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Fate:
    """What became of one schema."""

    source: str
    name: str
    lost: Sequence[str]
    """The keywords that were left out."""
    refusal: str
    """Why it was refused; empty: it compiles."""

    @property
    def kind(self) -> str:
        if self.refusal:
            return "refused"
        return "relaxed" if self.lost else "accepted"


def pool() -> Iterator[dict[str, Any]]:
    """Yield the entries: ``from``, ``name`` and ``schema``."""
    yield from map(json.loads, POOL.read_text().splitlines())


def fates() -> list[Fate]:
    tokenizer = ROOT / "tokenloom" / "demo_model" / "tokenizer.json"
    backend = LLGuidanceBackend(tokenizer, _VOCABULARY, (0,))
    return [_fate(backend, entry) for entry in pool()]


def _fate(backend: LLGuidanceBackend, entry: dict[str, Any]) -> Fate:
    source, lost = fitted(json.dumps(entry["schema"]))
    try:
        backend.prepare(StructuredOutput(GrammarKind.JSON, source))
        refusal = ""
    except GrammarError as error:
        refusal = str(error)
    keywords = tuple(dict.fromkeys(each.keyword for each in lost))
    return Fate(entry["from"], entry["name"], keywords, refusal)


def page(found: Sequence[Fate]) -> str:
    """Return the page in Markdown."""
    lines = []
    kinds = ("accepted", "relaxed", "refused")
    for source in (*dict.fromkeys(each.source for each in found), "all"):
        counts = Counter(each.kind for each in found if source in (each.source, "all"))
        total = sum(counts.values())
        shares = " | ".join(f"{counts[kind]} ({counts[kind] / total:.1%})" for kind in kinds)
        lines.append(f"| {source} | {total} | {shares} |")
    lines += ["", "## Relaxed", "", "| from | schema | left out |", "|---|---|---|"]
    lines += [
        f"| {each.source} | {each.name} | {', '.join(f'`{keyword}`' for keyword in each.lost)} |"
        for each in found
        if each.kind == "relaxed"
    ]
    lines += ["", "## Refused", "", "| from | schema | why |", "|---|---|---|"]
    lines += [f"| {each.source} | {each.name} | {each.refusal} |" for each in found if each.kind == "refused"]
    return _HEAD.format(count=len(found)) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(page(fates()))
