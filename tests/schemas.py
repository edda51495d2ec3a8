"""Random JSON schemas whose documents are of bounded length, so that any sampling comes to an end."""

import random
from typing import Any

MAX_DEPTH = 3
_NAMES = ("name", "age", "id", "tags", "items", "value", "note", "ok", "größe", "a b", 'q"q')


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top; below it whatever comes."""
    kinds = [_string, _integer, _number, _enum, _const, _boolean_or_null, _pattern]
    if depth == 0:
        return _object(rng, depth)
    if depth < MAX_DEPTH:
        kinds += [_object, _object, _array, _array, _any_of]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice([r"^[a-z]{1,4}$", r"^\d{2}-\d{2}$", "^(yes|no|maybe)$"])}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    """Written with few digits: nothing else bounds a number's."""
    return {"enum": [rng.randint(0, 99) / 4 for _ in range(3)]}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blue", "é", 'say "hi"', 7, None, True], rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["x", 3, None, "two words"])}


def _boolean_or_null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
