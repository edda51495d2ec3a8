"""The demo's table."""

import io

from rich.console import Console

from tokenloom.cli.chat_client import Answer
from tokenloom.cli.timeline_table import timeline_table


def test_every_step_has_its_row_and_the_rest_is_the_gateways() -> None:
    times = {"tokenize": 1.0, "placement": 0.5, "queued": 0.5, "prefill": 10.0, "decode": 200.0, "detokenize": 3.0}
    timeline = {f"{step}_ms": ms for step, ms in times.items()} | {"total_ms": 220.0, "prefill_engine": "engine-0"}
    usage = {"prompt_tokens": 12, "completion_tokens": 101}
    stream = io.StringIO()
    answer = Answer(usage=usage, timeline=timeline, seconds_to_first_token=0.0125)
    Console(file=stream, width=120).print(timeline_table(answer))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stream.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["tokenizer", "tokenize", "1.0", "chat template and text to 12 tokens"],
        ["coordinator", "placement", "0.5", "chose engine-0"],
        ["engine", "queue", "0.5", "waited for a place in the batch"],
        ["engine", "prefill", "10.0", "12 prompt tokens, first answer token"],
        ["engine", "decode", "200.0", "101 answer tokens, 500 a second"],
        ["output processor", "detokenize", "3.0", "tokens to text"],
        ["gateway", "the rest", "5.0", "HTTP, and the way between the services"],
        ["all", "total", "220.0", "first text after 12 ms"],
    ]
