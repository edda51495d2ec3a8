"""The SVG is well formed and shows what it was given."""

from xml.etree import ElementTree

from tokenloom.bench.report.plot import Panel, cdf_svg

SVG = "{http://www.w3.org/2000/svg}"


def curves(text: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(text)
    lines = (line.get("points", "").split() for line in root.iter(f"{SVG}polyline"))
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_a_curve_rises_to_the_top_at_its_largest_value() -> None:
    (curve,) = curves(cdf_svg([Panel("t", "ms", {"a": [float(value) for value in range(1000, 0, -1)]})]))
    assert curve == sorted(curve, key=lambda point: point[0])
    assert [y for _, y in curve] == sorted((y for _, y in curve), reverse=True)
    assert curve[-1][1] == 0.0
    assert len(curve) <= 202


def test_series_share_a_panels_scale() -> None:
    small, large = curves(cdf_svg([Panel("t", "ms", {"a": [1.0], "b": [2.0]})]))
    assert large[-1][0] == 2 * small[-1][0]


def test_nothing_measured_is_drawn_as_nothing_and_names_are_escaped() -> None:
    text = cdf_svg([Panel("<t>", "ms", {"a & b": []})])
    assert curves(text) == [[]]
    assert "&lt;t&gt;" in text
