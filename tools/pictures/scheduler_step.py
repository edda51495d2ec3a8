"""Draws one step of an engine: what the scheduler spends the token budget on, and the loop around it."""

from .canvas import Canvas

_REQUESTS = (
    ("A", 46, 1, 0, "generates: its newest token"),
    ("B", 28, 1, 0, "generates: its newest token"),
    ("C", 12, 10, 30, "long prompt: the next chunk"),
    ("D", 0, 7, 0, "new prompt, the first part was cached"),
)
"""Name, and the tokens computed before, in this step and later, in units of 8 pixels."""


def draw() -> Canvas:
    """Return the picture of a step."""
    canvas = Canvas(
        1000,
        620,
        "One step of an engine",
        "Each request has a number of tokens and a number of computed tokens. The scheduler spends the token budget of "
        "a step on letting the second catch up with the first: one token for each request that generates, chunks for "
        "prompts. Then the model runs, tokens are sampled, and the requests are updated.",
    )
    _loop(canvas)
    _requests(canvas)
    _budget(canvas)
    _blocks(canvas)
    return canvas


def _loop(canvas: Canvas) -> None:
    steps = (
        ("schedule", "coordinator", "which tokens of", "which requests"),
        ("execute", "gateway", "one forward pass", "over all of them"),
        ("sample", "output", "a token for each", "request that caught up"),
        ("update", "decode", "stop conditions,", "outputs to the front"),
    )
    for number, (title, tone, *lines) in enumerate(steps):
        x = 40 + 240 * number
        canvas.box(x, 28, 200, 84, tone, title, lines)
        if number < 3:
            canvas.arrow([(x + 204, 70), (x + 236, 70)], "plain")
    canvas.arrow([(860, 116), (860, 138), (140, 138), (140, 116)], "plain", style="dashed")
    canvas.label(500, 142, "the next step begins with the requests that arrived meanwhile", "tiny soft middle")


def _requests(canvas: Canvas) -> None:
    canvas.panel(40, 168, 920, 236, "running requests: num_computed_tokens catches up with num_tokens")
    for row, (name, before, now, later, text) in enumerate(_REQUESTS):
        y = 208 + 38 * row
        start = 100.0
        canvas.text(72, y + 18, name, "strong middle")
        if name == "D":
            canvas.cell(start, y, 8 * 16, 26, "decode", "cached")
            start += 8 * 16 + 2
        for width, style in ((before, "plain"), (now, "coordinator"), (later, "free")):
            if width:
                canvas.cell(start, y, 8 * width if width > 1 else 12, 26, style)
                start += (8 * width if width > 1 else 12) + 2
        canvas.text(max(start + 12, 560), y + 18, text, "small soft")
    _legend(canvas)


def _legend(canvas: Canvas) -> None:
    x = 100.0
    for style, text, width in (
        ("plain", "computed before", 150),
        ("decode", "found in the prefix cache", 205),
        ("coordinator", "computed in this step", 180),
        ("free", "in later steps", 120),
    ):
        canvas.cell(x, 374, 14, 14, style)
        canvas.text(x + 22, 385, text, "tiny soft")
        x += width


def _budget(canvas: Canvas) -> None:
    canvas.panel(40, 424, 450, 172, "token budget of this step (--max-num-batched-tokens)")
    x = 62.0
    for name, width in (("A", 18), ("B", 18), ("C: a chunk", 150), ("D: its rest", 120)):
        canvas.cell(x, 462, width, 40, "coordinator", name)
        x += width + 3
    canvas.cell(x, 462, 468 - x, 40, "free", "left over")
    canvas.text(62, 532, "Running requests come first, then waiting ones;", "small soft")
    canvas.text(62, 552, "waiting tenants take turns for the free seats.", "small soft")
    canvas.text(62, 576, "No phase of its own for prefill or for decode.", "small soft")


def _blocks(canvas: Canvas) -> None:
    canvas.panel(510, 424, 450, 172, "KV cache: blocks of 16 tokens")
    owners = "AAABBCCC.DDD..AB.C...."
    tones = {"A": "gateway", "B": "output", "C": "prefill", "D": "decode"}
    for number, owner in enumerate(owners):
        x, y = 532 + 37 * (number % 11), 460 + 34 * (number // 11)
        canvas.cell(x, y, 32, 28, f"{tones[owner]}-full" if owner in tones else "free", owner if owner in tones else "")
    canvas.text(532, 544, "When no block is free, the request that came last", "small soft")
    canvas.text(532, 562, "loses its blocks (preemption) and resumes later", "small soft")
    canvas.text(532, 580, "with the same tokens.", "small soft")
