"""Answer questions from a folder of Markdown files through a mesh. Run ``pip install openai`` and ``tokenloom serve``
first. SQLite's full-text search finds the passages; the model answers from them."""

import argparse
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

_INSTRUCTIONS = "Answer the question from the passages below. Name the passage that you used. If none helps, say so."
_LONGEST = 1200
"""Characters of a passage."""


@dataclass(frozen=True)
class Passage:
    """Holds a part of a file and where it comes from."""

    source: str
    text: str


def passages(folder: Path) -> Iterator[Passage]:
    """Yield the paragraphs of all Markdown files below a folder, with their headings; long ones are cut."""
    for path in sorted(folder.rglob("*.md")):
        title = ""
        for paragraph in re.split(r"\n{2,}", path.read_text().strip()):
            if paragraph.startswith("#"):
                title = paragraph.partition("\n")[0].strip("# ")
            else:
                yield Passage(f"{path.relative_to(folder)}: {title}", paragraph[:_LONGEST])


def index(found: Iterable[Passage]) -> sqlite3.Connection:
    """Return a database in memory that finds passages by their words."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE VIRTUAL TABLE passages USING fts5(source, text, tokenize = 'porter unicode61')")
    database.executemany("INSERT INTO passages VALUES (?, ?)", ((each.source, each.text) for each in found))
    return database


def search(database: sqlite3.Connection, question: str, count: int) -> Sequence[Passage]:
    """Return the best passages for a question, in the order of the files, so that equal passages make equal prompts."""
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
    best = database.execute(
        "SELECT rowid, source, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages) LIMIT ?",
        (words, count),
    )
    return [Passage(source, text) for _, source, text in sorted(best)]


def conversation(question: str, found: Sequence[Passage]) -> list[dict[str, str]]:
    """Return the messages. The passages come before the question, because a mesh caches equal beginnings of prompts."""
    texts = "\n\n".join(f"[{each.source}]\n{each.text}" for each in found)
    return [{"role": "system", "content": f"{_INSTRUCTIONS}\n\n{texts}"}, {"role": "user", "content": question}]


def answer(client: OpenAI, model: str, messages: list[dict[str, str]]) -> None:
    """Print the answer while it is generated, then how much of the prompt was in the prefix cache."""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} of them from the prefix cache]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--passages", type=int, default=2, help="how many passages the model reads")
    parser.add_argument("questions", nargs="+")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    database = index(passages(args.folder))
    for question in args.questions:
        found = search(database, question, args.passages)
        print(f"{question}\n  read: {'; '.join(each.source for each in found) or 'nothing'}")
        answer(client, model, conversation(question, found))


if __name__ == "__main__":
    main()
