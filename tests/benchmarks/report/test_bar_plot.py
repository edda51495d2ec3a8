"""Bars are as long as their figures."""

from xml.etree import ElementTree

from tokenloom.bench.report.bar_plot import Bar, bars_svg

SVG = "{http://www.w3.org/2000/svg}"


def widths(text: str) -> list[float]:
    rects = ElementTree.fromstring(text).iter(f"{SVG}rect")
    return [float(rect.get("width", "")) for rect in rects if rect.get("class") == "bar"]


def test_bars_of_a_group_share_a_scale_and_groups_do_not() -> None:
    groups = {"w1": [Bar("a", 10, 10, 10), Bar("b", 5, 4, 6)], "w2": [Bar("a", 1000, 1000, 1000)]}
    first, second, other = widths(bars_svg(groups, "tokens/s"))
    assert first == 2 * second == other


def test_names_are_escaped_and_nothing_measured_is_no_bar() -> None:
    assert widths(bars_svg({"<w>": []}, "x")) == []
    assert "&lt;w&gt;" in bars_svg({"<w>": []}, "x")
