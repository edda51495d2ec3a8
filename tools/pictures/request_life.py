"""Draws the life of a request: out to the engine as token ids, and back to the client as text."""

from .canvas import Canvas

_LANES = (
    ("client", "plain", 92),
    ("gateway", "gateway", 260),
    ("tokenizer", "tokenizer", 428),
    ("output processor", "output", 596),
    ("coordinator", "coordinator", 764),
    ("engine", "decode", 932),
)
_X = {name: x for name, _, x in _LANES}
_TONE = {name: tone for name, tone, _ in _LANES}
_OUT = (
    ("client", "gateway", "POST /v1/chat/completions"),
    ("gateway", "tokenizer", "EncodeChat"),
    ("tokenizer", "gateway", "token ids"),
    ("gateway", "output processor", "Submit: token ids, sampling parameters, deadline"),
    ("output processor", "coordinator", "Pick"),
    ("coordinator", "output processor", "engine-1"),
    ("output processor", "engine", "Add: the request, on the stream to engine-1"),
)
_BACK = (
    ("engine", "output processor", "EngineFrame: the tokens of one step"),
    ("output processor", "gateway", "ProcessFrame: the text of one step"),
    ("gateway", "client", "data: {…}"),
)
_END = (
    ("engine", "output processor", "Finished"),
    ("output processor", "gateway", "RequestFinished"),
    ("gateway", "client", "usage, data: [DONE]"),
)
_ROW = 40


def draw() -> Canvas:
    """Return the picture of a request's life."""
    canvas = Canvas(
        1020,
        770,
        "The life of a request",
        "The gateway has the text encoded by a tokenizer and submits the token ids to an output processor, which asks "
        "the coordinator for an engine and adds the request there. After each step, one frame per peer brings tokens "
        "to the output processor, text to the gateway and events to the client.",
    )
    for x in _X.values():
        canvas.line([(x, 70), (x, 740)], "faint dashed")
    for name, tone, x in _LANES:
        canvas.box(x - 78, 24, 156, 44, tone, name)
    after = _messages(canvas, _OUT, 108, 1)
    _compute(canvas, after)
    canvas.panel(24, after + 92, 972, 152)
    canvas.text(40, after + 114, "after each step", "small strong")
    canvas.text(40, after + 132, "one frame for all requests of a peer, in columns", "tiny soft")
    _messages(canvas, _BACK, after + 152, 8)
    _messages(canvas, _END, after + 278, 11)
    return canvas


def _messages(canvas: Canvas, messages: tuple[tuple[str, str, str], ...], y: float, number: int) -> float:
    """Draw messages below each other, and return where the next one would be."""
    for sender, receiver, text in messages:
        start, end = _X[sender], _X[receiver]
        to_the_right = end > start
        canvas.arrow(
            [(start + (12 if to_the_right else -12), y), (end - (4 if to_the_right else -4), y)], _TONE[sender]
        )
        canvas.label((start + end) / 2, y - 7, text, "tiny middle")
        canvas.number(start, y, number, _TONE[sender])
        y += _ROW
        number += 1
    return y


def _compute(canvas: Canvas, y: float) -> None:
    canvas.box(840, y - 12, 168, 84, "decode", "step by step", ("prefill in chunks,", "then a token per step"))
    canvas.box(492, y - 12, 208, 84, "output", "meanwhile", ("prepares the detokenizer,", "stop strings, journal"))
