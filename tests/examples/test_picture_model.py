"""The pictures and questions of the picture model."""

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.picture_model import drawing, questions


def test_the_same_seed_draws_the_same_pictures() -> None:
    first, second = ([drawing.draw(drawing.make_scene(rng), rng).tobytes() for _ in range(9)] for rng in _pair())
    assert first == second
    assert len(set(first)) == 9


def _pair() -> Iterator[random.Random]:
    return (random.Random(3) for _ in range(2))


def test_a_picture_shows_its_colours_where_the_scene_says() -> None:
    shapes = drawing.Shape("circle", "red", 12, 24, 8), drawing.Shape("square", "white", 36, 24, 8)
    picture = drawing.draw(drawing.Scene(shapes, "black"), random.Random(1))
    scale = picture.width / drawing.CANVAS
    red, white, black = (picture.getpixel((round(x * scale), round(24 * scale))) for x in (12, 36, 24))
    assert red[0] > 150 > 80 > max(red[1:])
    assert min(white) > 200
    assert max(black) < 50


@pytest.mark.parametrize("kind", questions.MAKERS)
def test_questions_and_answers_are_finished_text(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        scene = drawing.make_scene(rng)
        for text in questions.MAKERS[kind](scene, rng):
            assert text == text.strip() != ""
            assert kind == "limits" or not re.search(r"[{}]|\ba [aeiou]|  ", text), text


def test_the_answer_names_every_shape_and_where_it_is() -> None:
    left, right = drawing.Shape("star", "orange", 10, 20, 6), drawing.Shape("cross", "blue", 38, 26, 6)
    rng = random.Random(1)
    for shapes in ((left, right), (right, left)):
        scene = drawing.Scene(shapes, "white")
        assert questions.MAKERS["what"](scene, rng)[1] == "There is an orange star to the left of a blue cross."
    alone = drawing.Scene((drawing.Shape("circle", "green", 38, 8, 6),), "grey")
    assert questions.MAKERS["what"](alone, rng)[1] == "There is a green circle at the top right."
