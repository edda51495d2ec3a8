"""Write the training text and the held-out text of the demo model. This script makes up all of it.

Each line is one JSON object (see `tools.Document`). A chat question with a wording that hashes into the held-out bucket
never reaches the training file.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from .facts import NEW_CITIES, NEW_NAMES
from .questions import MAKERS, any_name, make_calendar, make_fact, make_json, make_sum
from .stories import story, topics
from .tools import Document, assistant, tool_chat, user

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "Answer in a few words.",
    "Be kind and brief.",
)


def question_chat(rng: random.Random, kind: str | None = None, turns: int = 1) -> Document:
    """`turns` questions with their answers, all of one kind or of mixed ones."""
    messages = []
    for _ in range(turns):
        drawn = kind or rng.choices(list(MAKERS), [weight for _, weight in MAKERS.values()])[0]
        question, answer = MAKERS[drawn][0](rng)
        messages += [user(question), assistant(answer)]
    return {"kind": kind or "mixed", "messages": messages}


def recall_chat(rng: random.Random) -> Document:
    """The name of the first turn is asked for in the last one, at times with other questions in between."""
    name = any_name(rng)
    opening = rng.choice(["Hi, I am {n}.", "My name is {n}.", "Hello, I'm {n}!"]).format(n=name)
    messages = [user(opening), assistant(f"Hello, {name}! How can I help you?")]
    for _ in range(rng.randint(0, 2)):
        question, answer = rng.choice([make_sum, make_fact, make_calendar])(rng)
        messages += [user(question), assistant(answer)]
    asked = rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "Tell me my name."])
    return {"kind": "recall", "messages": [*messages, user(asked), assistant(f"Your name is {name}.")]}


def training_document(rng: random.Random) -> Document:
    """One document of the training mix."""
    draw = rng.random()
    if draw < 0.06:
        return {"kind": "raw_story", "text": story(rng, rng.choice(topics() + [None] * 20))}
    if draw < 0.24:
        document = tool_chat(rng)
    elif draw < 0.30:
        document = recall_chat(rng)
    else:
        document = question_chat(rng, turns=rng.choice([1, 1, 1, 2, 3]))
        if rng.random() < 0.05:  # tools are there, but the question does not need them
            document["tools"] = tool_chat(rng, "tool_call")["tools"]
    if rng.random() < 0.2:
        document["messages"].insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return document


def is_held_out(document: Document) -> bool:
    """Whether any user turn falls into the bucket kept for evaluation: one question in 16."""
    asked = [m["content"] for m in document.get("messages", []) if m["role"] == "user"]
    return any(hashlib.sha256(text.encode()).digest()[0] < 16 for text in asked)


def training_documents(rng: random.Random, count: int) -> Iterator[Document]:
    """`count` documents without a held-out question."""
    while count:
        document = training_document(rng)
        if not is_held_out(document):
            yield document
            count -= 1


def evaluation_documents(rng: random.Random, count: int) -> Iterator[Document]:
    """At most `count` distinct held-out questions of each kind, then chats with names and cities never trained on."""
    makers: dict[str, Callable[[str], Document]] = {kind: lambda kind: question_chat(rng, kind) for kind in MAKERS}
    makers |= {kind: lambda kind: tool_chat(rng, kind) for kind in ("tool_call", "tool_answer", "no_tool")}
    for kind, make in makers.items():
        found: dict[str, Document] = {}
        for _ in range(20_000):  # a kind of few wordings has fewer than `count` held-out ones
            document = make(kind)
            if is_held_out(document):
                found.setdefault(json.dumps(document["messages"][0]), document)
            if len(found) == count:
                break
        yield from found.values()
    for _ in range(count):
        yield recall_chat(rng)
        question, answer = make_json(rng, rng.choice(NEW_NAMES))
        yield {"kind": "json_new_name", "messages": [user(question), assistant(answer)]}
        yield tool_chat(rng, "tool_call", city=rng.choice(NEW_CITIES)) | {"kind": "tool_new_city"}


def write(path: Path, documents: Iterator[Document]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--documents", type=int, default=160_000)
    parser.add_argument("--heldout-per-kind", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "train.jsonl", training_documents(random.Random(args.seed), args.documents))
    write(args.out / "heldout.jsonl", evaluation_documents(random.Random(args.seed + 1), args.heldout_per_kind))


if __name__ == "__main__":
    main()
