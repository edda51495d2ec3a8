"""Makes the mix of requests that a campaign sends: every feature whose state a fault could lose."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "remember",
            "parameters": {
                "type": "object",
                "properties": {"person": _PERSON},
                "required": ["person"],
                "additionalProperties": False,
            },
        },
    }
]
_NAMED_TOOL = {"type": "function", "function": {"name": "remember"}}
_BEGINNINGS = ("Once upon a time", "In a little room", "One rainy day", "A turtle and a mouse", "The old painter")


@dataclass(frozen=True)
class Case:
    """One distinct request. The options have the names that OpenAI's API and our client share."""

    name: str
    prompt: str | list[int] | None = None
    """A text or token ids of a completion."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The turns of a chat, in place of a prompt."""
    has_new_files: bool = False
    """Whether the images and sounds of each request are files that no part has seen before."""
    streamed: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    call: str | None = None
    """Method and path of a call that one client only makes; the options are its body, or the file and fields of its
    form."""
    client: str = ""
    """The name of that client; empty: all make the request in turns."""

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


MakeCase: TypeAlias = Callable[[random.Random, int, int], Case]
"""Makes a request of a vocabulary's size and an answer's length in tokens."""


def make_cases(
    rng: random.Random,
    vocab_size: int,
    tokens: tuple[int, int],
    count: int,
    more: Sequence[tuple[str, MakeCase]] = (),
) -> list[Case]:
    """Return ``count`` distinct requests, the features and ``more`` of them in turns.

    ``tokens``: bounds of the length of answers; features that end an answer earlier end it.
    """
    features = (*_FEATURES, *more)
    cases = []
    for number in range(count):
        position, feature = divmod(number, len(features))
        name, make = features[feature]
        streamed = (position + feature) % 3 != 0
        case = make(rng, vocab_size, rng.randint(*tokens))
        cases.append(replace(case, name=f"{name} {number}", streamed=streamed))
    return cases


def with_new_grammar(case: Case, number: int) -> Case:
    """Return a case whose schema, if it has one, no engine has compiled before; it means the same."""
    outputs = case.options.get("structured_outputs")
    if outputs is None:
        return case
    schema = {**outputs["json"], "title": f"Person {number}"}
    return replace(case, options={**case.options, "structured_outputs": {"json": schema}})


def user(content: Any) -> dict[str, Any]:
    """Return a user's turn of a text, or of parts in OpenAI's form."""
    return {"role": "user", "content": content}


def open_ended(length: int, **options: Any) -> dict[str, Any]:
    """Return the options of an answer of ``length`` tokens."""
    return {"max_tokens": length, "ignore_eos": True, **options}


def _text(rng: random.Random) -> str:
    return f"{rng.choice(_BEGINNINGS)} {rng.randint(1, 999)}"


def _ids(rng: random.Random, vocab_size: int, most: int = 120) -> list[int]:
    return [rng.randrange(10, vocab_size) for _ in range(rng.randint(8, most))]


def _greedy_text(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _text(rng), options=open_ended(length, temperature=0.0))


def _greedy_ids(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _ids(rng, vocab_size), options=open_ended(length, temperature=0.0))


def _seeded(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _text(rng), options=open_ended(length, temperature=0.9, top_p=0.95, seed=rng.getrandbits(31)))


def _penalties(rng: random.Random, vocab_size: int, length: int) -> Case:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    return Case(
        "", _ids(rng, vocab_size), options=open_ended(length, temperature=0.7, seed=rng.getrandbits(31), **penalties)
    )


def _stop(rng: random.Random, vocab_size: int, length: int) -> Case:
    # The first strings make the output processor withhold text; the last ends most answers of the demo model.
    return Case("", _text(rng), options=open_ended(length, temperature=0.0, stop=["never there", "wasx", "forgot"]))


def _schema(rng: random.Random, vocab_size: int, length: int) -> Case:
    options = {"temperature": 0.8, "seed": rng.getrandbits(31), "structured_outputs": {"json": _PERSON}}
    return Case("", _text(rng), options={"max_tokens": 400, **options})


def _samples(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _ids(rng, vocab_size), options=open_ended(length, n=3, temperature=0.9, seed=rng.getrandbits(31)))


def _logprobs(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _ids(rng, vocab_size), options=open_ended(length, temperature=0.0, logprobs=2))


def _min_tokens(rng: random.Random, vocab_size: int, length: int) -> Case:
    least = {"min_tokens": length // 2, "max_tokens": length}
    return Case("", _text(rng), options={"temperature": 0.0, "seed": 1, **least})


def _priority(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", _ids(rng, vocab_size), options=open_ended(length, temperature=0.0, priority=rng.randint(1, 9)))


def _chat(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case(
        "", messages=[user(f"Tell a story about {rng.randint(1, 999)}.")], options=open_ended(length, temperature=0.0)
    )


def _tools(rng: random.Random, vocab_size: int, length: int) -> Case:
    options = {"tools": TOOLS, "tool_choice": _NAMED_TOOL, "temperature": 0.6, "seed": rng.getrandbits(31)}
    return Case("", messages=[user(f"Remember person {rng.randint(1, 999)}.")], options={"max_tokens": 400, **options})


_FEATURES = (
    ("greedy text", _greedy_text),
    ("greedy ids", _greedy_ids),
    ("seeded", _seeded),
    ("penalties", _penalties),
    ("stop strings", _stop),
    ("JSON schema", _schema),
    ("n=3", _samples),
    ("logprobs", _logprobs),
    ("min_tokens", _min_tokens),
    ("priority", _priority),
    ("chat", _chat),
    ("tools", _tools),
)
FEATURES = tuple(name for name, _ in _FEATURES)
