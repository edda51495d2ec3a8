"""Asks about scenes, and gives the one right answer to each question."""

import random
from collections.abc import Callable

from examples.demo_model import questions as demo_questions

from .drawing import BACKGROUNDS, COLOURS, SHAPES, Scene, Shape

Pair = tuple[str, str]
"""A question and its answer."""

NO_PICTURE = "I see no picture. Send me one with coloured shapes, and I will describe it."
LIMITS = "I only know pictures of one or two coloured shapes, so I cannot answer that."
GREETING = "Hello! Send me a picture of one or two coloured shapes, and ask me what is in it."
WHO = "I am a small demo model. I describe pictures of one or two coloured shapes, and I know nothing else."

_NAMES = ("picture", "image", "picture", "drawing", "photo")
_WHAT = (
    "What is in the {picture}?",
    "What is in the {picture}?",
    "What is in this {picture}?",
    "What's in the {picture}?",
    "What do you see?",
    "What do you see in the {picture}?",
    "What can you see in this {picture}?",
    "Describe the {picture}.",
    "Describe this {picture}.",
    "What does the {picture} show?",
    "What is this?",
    "Tell me what is in the {picture}.",
)
_GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "Good evening.", "Hello there.")
_ABOUT = ("Who are you?", "What are you?", "What can you do?", "What do you know?", "Help", "How can you help me?")
_OTHER = (
    "What is the capital of {name}?",
    "Who wrote {name}?",
    "Who is {name}?",
    "How far is it to {name}?",
    "What is the weather in {name}?",
    "Write a poem about {name}.",
    "Translate {name} into French.",
    "Why is the sky blue?",
    "How old are you?",
    "Tell me a joke.",
    "What time is it?",
    "What do you think about {name}?",
)


def _article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def _called(shape: Shape) -> str:
    return f"{shape.colour} {shape.name}"


def _what(scene: Scene, rng: random.Random) -> Pair:
    first = scene.shapes[0]
    question = rng.choice(_WHAT).format(picture=rng.choice(_NAMES))
    if len(scene.shapes) == 1:
        return question, f"There is {_article(_called(first))} {first.place}."
    left, right = sorted(scene.shapes, key=lambda shape: shape.x)
    upper, lower = sorted(scene.shapes, key=lambda shape: shape.y)
    first, second = (left, right) if left.relation(right) == "to the left of" else (upper, lower)
    return question, f"There is {_article(_called(first))} {first.relation(second)} {_article(_called(second))}."


def _colour(scene: Scene, rng: random.Random) -> Pair:
    name, shape = _wanted(scene, rng)
    question = f"What {rng.choice(('colour', 'color'))} is the {name}?"
    return question, f"The {name} is {shape.colour}." if shape else f"There is no {name} in the picture."


def _wanted(scene: Scene, rng: random.Random) -> tuple[str, Shape | None]:
    """Return the name of a shape to ask about, and that shape, which one picture in four does not show."""
    shape = rng.choice(scene.shapes)
    if rng.random() < 0.75:
        return shape.name, shape
    return rng.choice([name for name in SHAPES if name not in {each.name for each in scene.shapes}]), None


def _where(scene: Scene, rng: random.Random) -> Pair:
    name, shape = _wanted(scene, rng)
    question = f"Where is the {name}?"
    if shape is None:
        return question, f"There is no {name} in the picture."
    if len(scene.shapes) == 1:
        return question, f"The {name} is {shape.place}."
    (other,) = (each for each in scene.shapes if each is not shape)
    return question, f"The {name} is {shape.relation(other)} the {other.name}."


def _which(scene: Scene, rng: random.Random) -> Pair:
    shape = rng.choice(scene.shapes)
    return f"Which shape is {shape.colour}?", f"The {shape.name} is {shape.colour}."


def _count(scene: Scene, rng: random.Random) -> Pair:
    question = f"How many shapes are in the {rng.choice(_NAMES)}?"
    return question, "There is one shape." if len(scene.shapes) == 1 else "There are two shapes."


def _behind(scene: Scene, rng: random.Random) -> Pair:
    return f"What {rng.choice(('colour', 'color'))} is the background?", f"The background is {scene.background}."


def _is_there(scene: Scene, rng: random.Random) -> Pair:
    shape = rng.choice(scene.shapes)
    name, colour = shape.name, shape.colour
    if rng.random() < 0.5:  # the other colour or the other shape
        name = rng.choice(SHAPES) if rng.random() < 0.5 else name
        colour = rng.choice(list(COLOURS)) if rng.random() < 0.5 else colour
    is_there = any((each.name, each.colour) == (name, colour) for each in scene.shapes)
    wanted = f"{colour} {name}"
    question = f"Is there {_article(wanted)}?"
    return question, f"Yes, there is {_article(wanted)}." if is_there else f"No, there is no {wanted}."


def _limits(_: Scene, rng: random.Random) -> Pair:
    return _other(rng), LIMITS


MAKERS: dict[str, Callable[[Scene, random.Random], Pair]] = {
    "what": _what,
    "colour": _colour,
    "where": _where,
    "which": _which,
    "count": _count,
    "background": _behind,
    "is there": _is_there,
    "limits": _limits,
}
"""The kinds of questions about a picture."""
WEIGHTS = (3, 4, 3, 4, 1, 2, 5, 1)
"""How often each kind is asked: those about a named shape or colour are learnt last."""


def conversation(scene: Scene, rng: random.Random, turns: int) -> list[Pair]:
    """Return questions about one picture; one in three conversations begins with what is in it."""
    kinds = rng.choices(list(MAKERS), WEIGHTS, k=turns)
    return [MAKERS[kind](scene, rng) for kind in kinds]


def without_picture(rng: random.Random) -> Pair:
    """Return a question of a user who sent no picture."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(_GREETINGS), GREETING
    if kind == 1:
        return rng.choice(_ABOUT), WHO
    if kind == 2:
        return _other(rng), LIMITS
    shape = Shape(rng.choice(SHAPES), rng.choice(list(COLOURS)), 0, 0, 0)
    maker = MAKERS[rng.choice([name for name in MAKERS if name != "limits"])]
    return maker(Scene((shape,), rng.choice(list(BACKGROUNDS))), rng)[0], NO_PICTURE


def _other(rng: random.Random) -> str:
    """Return a question that has nothing to do with pictures."""
    if rng.random() < 0.5:
        kind = rng.choice([name for name in demo_questions.MAKERS if name not in ("identity", "greeting")])
        return demo_questions.MAKERS[kind][0](rng)[0]
    name = "".join(rng.choice("bdfglmnprstv") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))).capitalize()
    return rng.choice(_OTHER).format(name=name)
