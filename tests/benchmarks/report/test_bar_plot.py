"""Bars are as long as their figures."""

from xml.etree import ElementTree

import pytest

from tokenloom.bench.report.bar_plot import Bar, bars_svg, stacks_svg

SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str) -> list[tuple[str, float]]:
    """Return the colour and the width of each bar."""
    rects = ElementTree.fromstring(text).iter(f"{SVG}rect")
    styles = [(rect.get("class", "").split(), float(rect.get("width", ""))) for rect in rects]
    return [(style[1], width) for style, width in styles if style[0] == "bar"]


def test_bars_of_a_group_share_a_scale_and_groups_do_not() -> None:
    groups = {"w1": [Bar("a", 10, 10, 10), Bar("b", 5, 4, 6)], "w2": [Bar("a", 1000, 1000, 1000)]}
    (_, first), (_, second), (_, other) = bars(bars_svg(groups, "t"))
    assert first == 2 * second == other


def test_a_name_has_one_colour_in_all_groups() -> None:
    groups = {"w1": [Bar("a", 1, 1, 1), Bar("b", 1, 1, 1)], "w2": [Bar("b", 1, 1, 1)]}
    assert [colour for colour, _ in bars(bars_svg(groups, "t"))] == ["c0", "c1", "c1"]


def test_parts_of_a_bar_follow_each_other_and_all_bars_share_a_scale() -> None:
    drawn = ElementTree.fromstring(stacks_svg({"x": {"a": 10, "b": 30}, "y": {"a": 20}}, "µs", "t"))
    rects = [rect for rect in drawn.iter(f"{SVG}rect") if rect.get("class", "").startswith("bar")]
    (left, first), (next_left, second), (start, third) = (
        (float(rect.get("x", "")), float(rect.get("width", ""))) for rect in rects
    )
    assert next_left == pytest.approx(left + first, abs=0.1)
    assert start == left
    assert second == pytest.approx(3 * first, abs=0.2)
    assert third == pytest.approx(2 * first, abs=0.2)
    assert drawn.findtext(f"{SVG}desc") == "x: a 10, b 30 µs. y: a 20 µs"


@pytest.mark.parametrize("text", [bars_svg({"<w>": []}, "<t>"), stacks_svg({"<w>": {}}, "<u>", "<t>")])
def test_names_are_escaped_and_nothing_measured_is_no_bar(text: str) -> None:
    assert bars(text) == []
    assert "&lt;w&gt;" in text
    assert "&lt;t&gt;" in text
