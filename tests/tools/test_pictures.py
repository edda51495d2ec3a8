"""The pictures in docs/pictures are current, load nothing and fit their frames."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures.gallery import PICTURES

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = {"tiny": 6.0, "small": 6.8}
"""Pixels that a character of a text takes on average, by size."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_current(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name]().svg(), "run `make pictures`"


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_texts_lie_inside_the_picture(name: str) -> None:
    root = ElementTree.fromstring(PICTURES[name]().svg())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter(f"{SVG}text"):
        styles = element.attrib["class"].split()
        length = len(element.text or "") * next((each for style, each in WIDTHS.items() if style in styles), 7.8)
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        left = x - (length / 2 if "middle" in styles else length if "end" in styles else 0)
        assert left >= 0, element.text
        assert left + length <= width, element.text
        assert 10 <= y <= height - 4, element.text


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_loads_nothing_and_describes_itself(name: str) -> None:
    text = PICTURES[name]().svg()
    root = ElementTree.fromstring(text)
    assert not re.search(r"href|url\((?!#)|@import|<script", text)
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
