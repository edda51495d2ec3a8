"""How ``tokenloom demo`` shows an image on a terminal, and measures the pause of an answer whose engine is killed."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image
from rich.console import Console
from rich.style import Style

from tokenloom.cli.chat.chat_client import Answer
from tokenloom.cli.mesh import demo_run
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


@dataclass
class Engine:
    """A part that is killed, and starts again when somebody waits for it."""

    spec: Any = field(default_factory=lambda: SimpleNamespace(name="engine-1"))
    restarts: int = 0
    waits: list[int] = field(default_factory=list)

    async def restarted(self, restarts: int) -> None:
        self.waits.append(restarts)
        self.restarts += 1


@dataclass
class Demo:
    """Kills of an engine, with answers as the mesh gives them: whole, after the engine computed them, or in pieces."""

    engine: Engine = field(default_factory=Engine)
    written: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        mesh = SimpleNamespace(parts=[self.engine], crash_engine=lambda: self.engine)
        console = Console(file=self.written, width=200, soft_wrap=True)
        body = {"model": "demo"}
        self.kills = demo_run._Kills(console, cast("Any", mesh), cast("Any", None), body, "why?", "0123456789")

    def lines(self) -> list[str]:
        return [line for line in self.written.getvalue().splitlines() if line.startswith("kill ")]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Demo:
    """A demo whose answers are late, one after the other, as the parameter says."""
    late: Iterator[bool] = iter(request.param)

    def stream_chat(server: object, body: object, on_text: Callable[[str], None]) -> Answer:
        is_late = next(late)
        for piece in ("0123456789",) if is_late else "0123456789":
            on_text(piece)
        return Answer("0123456789", timeline={"decode_engine": "engine-1" if is_late else "engine-0"})

    monkeypatch.setattr(demo_run, "stream_chat", stream_chat)
    return Demo()


@pytest.mark.parametrize("demo", [[True, False, False]], indirect=True)
async def test_an_answer_that_was_computed_before_the_kill_is_asked_for_once_more(demo: Demo) -> None:
    await demo.kills.run(2)
    first, *others = demo.lines()
    assert first.endswith("engine-1 had computed the whole answer before it ended; the question is asked once more")
    assert [line.partition("; engine-0 went on")[0] for line in others] == [
        "kill 1: engine-1 ended after 1 of 10 characters",
        "kill 2: engine-1 ended after 2 of 10 characters",
    ], "once more at the first piece, later as ever"
    assert "2 kills during answers: 0 broken, 2 continued" in demo.written.getvalue()
    assert demo.engine.waits == [0, 1], "each next answer is asked for when the engine serves again"


@pytest.mark.parametrize("demo", [[True] * 5], indirect=True)
async def test_an_answer_that_is_always_computed_before_the_kill_is_asked_for_a_few_times(demo: Demo) -> None:
    await demo.kills.run(1)
    ends = [line.partition("; ")[2] for line in demo.lines()]
    assert ends == [*["the question is asked once more"] * 3, "nothing was left for another engine"]
    assert demo.kills.pauses == []
    assert demo.engine.waits == [0, 1, 2]
