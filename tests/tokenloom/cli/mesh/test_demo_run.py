"""How ``tokenloom demo`` shows an image on a terminal, and measures the pause of an answer whose engine is killed."""

from pathlib import Path

import pytest
from PIL import Image
from rich.style import Style

from tokenloom.cli.mesh.demo_run import InterruptedAnswer, picture_text


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


def test_an_answer_is_interrupted_once_and_its_longest_pause_is_measured_from_then_on() -> None:
    written: list[str] = []
    interrupted: list[str] = []
    times = iter([0.0, 5.0, 5.2, 6.0, 6.1])
    watch = InterruptedAnswer(4, lambda: interrupted.append("".join(written)), written.append, lambda: next(times))
    for piece in ("abc", "de", "f", "g", "h"):
        watch(piece)
    assert interrupted == ["abcde"], "the pause of 5 s before belongs to nothing that was killed"
    assert (watch.killed_after, watch.pause, "".join(written)) == (5, pytest.approx(0.8), "abcdefgh")


def test_an_answer_that_ends_with_the_interruption_has_no_pause() -> None:
    watch = InterruptedAnswer(0, lambda: None)
    assert watch.killed_after is None
    watch("a")
    assert (watch.killed_after, watch.pause) == (1, None)
