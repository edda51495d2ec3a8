"""Draws the parts of a mesh and the streams between them."""

from .canvas import Canvas


def draw() -> Canvas:
    """Return the picture of the mesh."""
    canvas = Canvas(
        1000,
        560,
        "The mesh",
        "A client sends requests to a gateway. The gateway asks a tokenizer for token ids and sends the request to an "
        "output processor, which asks the coordinator for an engine and streams tokens from it. Engines report their "
        "load to the coordinator. KV blocks move from prefill engines to decode engines.",
    )
    _parts(canvas)
    _streams(canvas)
    _control(canvas)
    return canvas


def _parts(canvas: Canvas) -> None:
    canvas.panel(168, 24, 808, 512, "one mesh: each part is a process, and runs, scales and restarts independently")
    canvas.box(24, 226, 104, 84, "plain", "client", ("any OpenAI", "client"))
    canvas.box(200, 206, 164, 124, "gateway", "gateway", ("HTTP, SSE, gRPC", "keys, limits", "validation"), copies=2)
    canvas.box(200, 66, 164, 78, "tokenizer", "tokenizer", ("text, chat → token ids",), copies=2)
    canvas.box(
        456, 206, 184, 124, "output", "output processor", ("token ids → text", "placement", "stop strings"), copies=2
    )
    canvas.box(456, 430, 184, 78, "coordinator", "coordinator", ("knows all engines",))
    _engine(canvas, 66, "prefill", "prefill engine", "prompts, first token")
    _engine(canvas, 356, "decode", "decode engine", "all other tokens")


def _engine(canvas: Canvas, y: float, tone: str, title: str, text: str) -> None:
    canvas.box(732, y, 212, 124, tone, "", copies=2)
    canvas.text(838, y + 27, title, "strong middle")
    canvas.text(838, y + 46, text, "small soft middle")
    canvas.cell(746, y + 62, 88, 46, "free", "")
    canvas.cell(842, y + 62, 88, 46, "free", "")
    canvas.text(790, y + 82, "front", "tiny strong middle")
    canvas.text(790, y + 98, "streams", "tiny soft middle")
    canvas.text(886, y + 82, "core", "tiny strong middle")
    canvas.text(886, y + 98, "KV cache", "tiny soft middle")


def _streams(canvas: Canvas) -> None:
    canvas.arrow([(132, 268), (196, 268)], "gateway", both=True)
    canvas.arrow([(282, 202), (282, 160)], "tokenizer", both=True)
    canvas.arrow([(378, 268), (452, 268)], "output", both=True)
    canvas.text(415, 248, "one stream", "tiny soft middle")
    canvas.text(415, 292, "one frame", "tiny soft middle")
    canvas.text(415, 306, "per step", "tiny soft middle")
    canvas.arrow([(654, 252), (690, 252), (690, 128), (728, 128)], "prefill", both=True)
    canvas.arrow([(654, 286), (690, 286), (690, 418), (728, 418)], "decode", both=True)
    canvas.arrow([(838, 204), (838, 352)], "plain", style="thick")
    canvas.label(838, 268, "KV blocks", "small strong middle")
    canvas.label(838, 286, "under a lease", "tiny soft middle")


def _control(canvas: Canvas) -> None:
    canvas.arrow([(548, 344), (548, 426)], "coordinator", style="dashed", both=True)
    canvas.label(548, 388, "Pick: which engine?", "tiny soft middle")
    canvas.arrow([(728, 466), (646, 466)], "coordinator", style="dashed")
    canvas.arrow(
        [(954, 128), (962, 128), (962, 520), (700, 520), (700, 486), (646, 486)], "coordinator", style="dashed"
    )
    canvas.text(684, 456, "load reports", "tiny soft middle")
    canvas.text(200, 446, "solid: requests and tokens", "small soft")
    canvas.text(200, 468, "dashed: placement, off the data path", "small soft")
    canvas.text(200, 490, "stacked: any number of replicas", "small soft")
