"""Draws how KV blocks move from a prefill engine to a decode engine under a lease."""

from .canvas import Canvas

_HELD = {(1, 0), (2, 0), (3, 0), (1, 1), (4, 1)}
_COPIED = {(0, 1), (2, 1), (3, 1), (5, 1), (1, 2)}
_LEFT, _RIGHT = 40, 680


def draw() -> Canvas:
    """Return the picture of prefill, hand-over and decode."""
    canvas = Canvas(
        1000,
        640,
        "Prefill and decode on different engines",
        "The output processor places the prompt on a prefill engine, which computes it, samples the first token and "
        "keeps the KV blocks under a lease. The decode engine acquires the lease, copies the blocks, and asks whether "
        "the lease still held. If it did, the request continues there; otherwise the decode engine recomputes the "
        "prompt.",
    )
    _output_processor(canvas)
    _engine(canvas, _LEFT, "prefill", "prefill engine", "computes the prompt, samples token 1", _HELD)
    _engine(canvas, _RIGHT, "decode", "decode engine", "continues with token 2", _COPIED)
    _exchange(canvas)
    _outcomes(canvas)
    return canvas


def _output_processor(canvas: Canvas) -> None:
    canvas.box(390, 28, 220, 72, "output", "output processor", ("runs both legs",))
    canvas.arrow([(386, 52), (130, 52), (130, 166)], "output")
    canvas.number(130, 112, 1, "output")
    canvas.text(148, 108, "Add(hold_kv)", "small mono")
    canvas.text(148, 125, "the prompt", "tiny soft")
    canvas.arrow([(270, 166), (270, 78), (386, 78)], "prefill")
    canvas.number(270, 138, 2, "prefill")
    canvas.text(288, 134, "token 1, Finished", "small mono")
    canvas.text(288, 151, "PREFILLED, and the lease", "tiny soft")
    canvas.arrow([(614, 52), (870, 52), (870, 166)], "output")
    canvas.number(870, 112, 3, "output")
    canvas.text(852, 108, "Add(kv_source)", "small mono end")
    canvas.text(852, 125, "the prompt, token 1, the lease", "tiny soft end")


def _engine(canvas: Canvas, x: float, tone: str, title: str, text: str, blocks: set[tuple[int, int]]) -> None:
    canvas.box(x, 170, 280, 290, tone, "")
    canvas.text(x + 140, 198, title, "strong middle")
    canvas.text(x + 140, 218, text, "small soft middle")
    canvas.text(x + 26, 254, "KV block pool", "tiny soft")
    for column in range(6):
        for row in range(4):
            style = f"{tone}-full" if (column, row) in blocks else "free"
            canvas.cell(x + 26 + 39 * column, 264 + 34 * row, 33, 28, style, "KV" if (column, row) in blocks else "")
    held = "held by the lease: 30 s unless renewed" if tone == "prefill" else "copied, unused until they are verified"
    canvas.cell(x + 26, 420, 14, 14, f"{tone}-full")
    canvas.text(x + 48, 431, held, "tiny soft")


def _exchange(canvas: Canvas) -> None:
    rows = (
        ("decode", "Acquire(lease, digest)", "", True),
        ("prefill", "block ids, generations", "", False),
        ("plain", "KV blocks", "shm, nixl or socket", False),
        ("decode", "Release(generations)", "did the lease hold?", True),
        ("prefill", "valid", "", False),
    )
    for number, (tone, text, more, to_the_left) in enumerate(rows, start=4):
        y = 206 + 56 * (number - 4)
        ends = [(676, y), (324, y)] if to_the_left else [(324, y), (676, y)]
        canvas.arrow(ends, tone, style="thick" if tone == "plain" else "")
        canvas.number(640 if to_the_left else 360, y, number, tone)
        canvas.label(500, y - 8, text, "small mono middle" if tone != "plain" else "small strong middle")
        if more:
            canvas.text(500, y + 17, more, "tiny soft middle")


def _outcomes(canvas: Canvas) -> None:
    canvas.panel(40, 492, 440, 122, "valid")
    canvas.text(54, 540, "The decode engine hashes the copied blocks into its prefix", "small")
    canvas.text(54, 560, "cache and generates from token 2.", "small")
    canvas.text(54, 590, "The prefill engine frees its blocks.", "small soft")
    canvas.panel(520, 492, 440, 122, "not valid: expired, reassigned, cut, too slow")
    canvas.text(534, 540, "The decode engine discards the copy and computes the", "small")
    canvas.text(534, 560, "prompt itself. The client notices a pause, the tokens", "small")
    canvas.text(534, 580, "stay the same.", "small")
    canvas.arrow([(640, 464), (640, 478), (260, 478), (260, 490)], "decode")
    canvas.arrow([(820, 464), (820, 490)], "lost", style="dashed")
