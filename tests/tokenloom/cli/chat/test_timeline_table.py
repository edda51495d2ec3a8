"""The demo's table."""

import io
from typing import Any

from rich.console import Console

from tokenloom.cli.chat.chat_client import Answer
from tokenloom.cli.chat.timeline_table import timeline_table


def rows(**engines: Any) -> list[list[str]]:
    times = {
        "tokenize": 1.0,
        "placement": 0.5,
        "queued": 0.5,
        "prefill": 10.0,
        "kv_transfer": 2.0 * (engines["prefill_engine"] != engines["decode_engine"]),
        "decode": 202.0,
        "detokenize": 3.0,
    }
    timeline = {f"{step}_ms": ms for step, ms in times.items()} | {"total_ms": 222.0} | engines
    usage = {"prompt_tokens": 12, "completion_tokens": 101}
    stream = io.StringIO()
    answer = Answer(usage=usage, timeline=timeline, seconds_to_first_token=0.0125)
    Console(file=stream, width=120).print(timeline_table(answer))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in stream.getvalue().splitlines() if "│" in line]


def test_every_step_has_its_row_and_the_rest_is_the_gateways() -> None:
    assert rows(prefill_engine="engine-0", decode_engine="engine-1") == [
        ["tokenizer", "tokenize", "1.0", "chat template and text to 12 tokens"],
        ["coordinator", "placement", "0.5", "selected engine-0 to prefill, engine-1 to decode"],
        ["engine", "queue", "0.5", "waited for a slot in the batch"],
        ["engine", "prefill", "10.0", "12 prompt tokens, first answer token"],
        ["engine", "KV transfer", "2.0", "KV blocks of the prompt, engine-0 to engine-1"],
        ["engine", "decode", "200.0", "101 answer tokens, 500 a second"],
        ["output processor", "detokenize", "3.0", "tokens to text"],
        ["gateway", "other", "5.0", "HTTP, and calls between the services"],
        ["all", "total", "222.0", "first text after 12 ms"],
    ]


def test_drafts_have_a_row() -> None:
    drafts = {"num_drafts": 20, "num_draft_tokens": 100, "num_accepted_tokens": 60}
    table = rows(prefill_engine="engine-0", decode_engine="engine-0", drafts=drafts)
    assert ["engine", "drafts", "", "60% of 100 drafts right, 4.0 tokens a step with drafts"] in table


def test_one_engine_transfers_nothing() -> None:
    table = rows(prefill_engine="engine-0", decode_engine="engine-0")
    assert ["coordinator", "placement", "0.5", "selected engine-0"] in table
    assert ["engine", "KV transfer", "0.0", "none: one engine did both"] in table
    assert ["engine", "decode", "202.0", "101 answer tokens, 495 a second"] in table
