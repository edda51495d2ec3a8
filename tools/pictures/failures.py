"""Draws what happens when a part of the mesh dies: one card for each part."""

from dataclasses import dataclass

from .canvas import Canvas


@dataclass(frozen=True)
class Card:
    """Describes the loss of one part: what takes over, and what the client sees."""

    part: str
    tone: str
    before: tuple[str, str]
    """The neighbour that notices, and its tone."""
    heir: str
    text: tuple[str, str]


_CARDS = (
    Card(
        "gateway",
        "gateway",
        ("client", "plain"),
        "other gateway",
        ("A client that resumes continues at another gateway.", "A plain client sees its connection close."),
    ),
    Card(
        "tokenizer",
        "tokenizer",
        ("gateway", "gateway"),
        "other tokenizer",
        ("The gateway calls another one.", "The client sees nothing."),
    ),
    Card(
        "output processor",
        "output",
        ("gateway", "gateway"),
        "other processor",
        ("The gateway sends the request and what the client", "has received to another one: a pause."),
    ),
    Card(
        "coordinator",
        "coordinator",
        ("processor", "output"),
        "last snapshot",
        ("Output processors place by its last snapshot.", "The client sees nothing."),
    ),
    Card(
        "prefill engine",
        "prefill",
        ("processor", "output"),
        "other engine",
        ("Before the hand-over: another engine prefills.", "After it: nothing."),
    ),
    Card(
        "decode engine",
        "decode",
        ("processor", "output"),
        "other engine",
        ("Another engine recomputes prompt and tokens and", "continues with the same seed: a pause."),
    ),
    Card(
        "worker process",
        "decode",
        ("engine core", "plain"),
        "new worker",
        ("The core starts it again and repeats the step:", "a pause. With KV transfer, as the engine."),
    ),
    Card(
        "KV link",
        "plain",
        ("decode engine", "decode"),
        "recompute",
        ("The decode engine computes the prompt itself.", "The client sees a pause at most."),
    ),
)


def draw() -> Canvas:
    """Return the picture of the failures."""
    canvas = Canvas(
        1000,
        858,
        "What happens when a part dies",
        " ".join(f"{card.part}: {' '.join(card.text)}" for card in _CARDS),
    )
    canvas.text(28, 44, "When a part dies, another one of its kind takes over", "strong")
    for number, card in enumerate(_CARDS):
        _draw_card(canvas, card, 24 + 484 * (number % 2), 64 + 196 * (number // 2))
    return canvas


def _draw_card(canvas: Canvas, card: Card, x: float, y: float) -> None:
    canvas.panel(x, y, 468, 180)
    canvas.box(x + 18, y + 37, 124, 44, card.before[1], "")
    canvas.text(x + 80, y + 64, card.before[0], "small strong middle")
    canvas.box(x + 282, y + 16, 168, 40, "lost", "")
    canvas.text(x + 379, y + 41, card.part, "small strong middle")
    canvas.cross(x + 301, y + 36, 7)
    canvas.box(x + 282, y + 70, 168, 40, card.tone, "")
    canvas.text(x + 366, y + 95, card.heir, "small strong middle")
    canvas.arrow([(x + 146, y + 52), (x + 212, y + 52), (x + 212, y + 36), (x + 278, y + 36)], "lost", style="dashed")
    canvas.arrow([(x + 146, y + 66), (x + 212, y + 66), (x + 212, y + 90), (x + 278, y + 90)], "decode", style="thick")
    for number, line in enumerate(card.text):
        canvas.text(x + 18, y + 140 + 20 * number, line, "small" if number == 0 else "small soft")
