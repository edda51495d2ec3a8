"""How ``tokenloom demo`` shows an image on a terminal."""

from pathlib import Path

from PIL import Image
from rich.style import Style

from tokenloom.cli.mesh.demo_run import picture_text


def test_a_character_shows_two_pixels(tmp_path: Path) -> None:
    image = Image.new("RGB", (3, 4), "red")
    image.putpixel((1, 0), (0, 0, 255))
    image.save(tmp_path / "a.png")
    shown = picture_text(tmp_path / "a.png")
    assert shown.plain == "▀▀▀\n▀▀▀\n"
    styles = [Style.parse(str(span.style)) for span in shown.spans]
    blue_above_red, red = Style.parse("#0000ff on #ff0000"), Style.parse("#ff0000 on #ff0000")
    assert styles == [red, blue_above_red, red, red, red, red]


def test_a_large_picture_fits_a_terminal(tmp_path: Path) -> None:
    Image.new("L", (400, 200)).save(tmp_path / "a.png")
    lines = picture_text(tmp_path / "a.png").plain.splitlines()
    assert [len(line) for line in lines] == [32] * 8
