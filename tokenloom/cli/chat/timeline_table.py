"""Shows how the time of one answer is divided among the services."""

from collections.abc import Mapping

from rich.table import Table

from .chat_client import Answer

_STEPS = (
    ("tokenizer", "tokenize", "tokenize_ms", "chat template and text to {prompt_tokens} tokens"),
    ("coordinator", "placement", "placement_ms", "selected {engines}"),
    ("engine", "queue", "queued_ms", "waited for a slot in the batch"),
    ("engine", "prefill", "prefill_ms", "{prompt_tokens} prompt tokens, first answer token"),
    ("engine", "KV transfer", "kv_transfer_ms", "{transfer}"),
    ("engine", "decode", "decode_ms", "{completion_tokens} answer tokens, {rate:.0f} a second"),
    ("output processor", "detokenize", "detokenize_ms", "tokens to text"),
)
"""Service, step, key in the timeline, description."""


def timeline_table(answer: Answer) -> Table:
    """Return a row for each step; the rest of the total is spent in the gateway and between the services."""
    timeline = dict(answer.timeline)
    if _is_pair(timeline):  # decode counts from the first token, which comes before the blocks
        timeline["decode_ms"] = max(timeline["decode_ms"] - timeline["kv_transfer_ms"], 0.0)
    decode_seconds = timeline["decode_ms"] / 1e3
    details = {
        **answer.usage,
        **timeline,
        "engines": _engines(timeline),
        "transfer": _transfer(timeline),
        "rate": (answer.usage["completion_tokens"] - 1) / decode_seconds if decode_seconds else 0.0,
    }
    table = Table(title="What each service did", title_justify="left", title_style="bold")
    table.add_column("service")
    table.add_column("step")
    table.add_column("ms", justify="right")
    table.add_column("", style="dim")
    rest = timeline["total_ms"]
    for service, step, key, text in _STEPS:
        rest -= timeline[key]
        table.add_row(service, step, f"{timeline[key]:.1f}", text.format(**details))
        if step == "decode" and (drafts := timeline.get("drafts")) is not None:
            table.add_row(service, "drafts", "", _drafts(drafts))
    table.add_row("gateway", "other", f"{max(rest, 0.0):.1f}", "HTTP, and calls between the services")
    table.add_section()
    first = f"first text after {answer.seconds_to_first_token * 1e3:.0f} ms"
    table.add_row("all", "total", f"{timeline['total_ms']:.1f}", first, style="bold")
    return table


def _engines(timeline: Mapping[str, object]) -> str:
    if _is_pair(timeline):
        return f"{timeline['prefill_engine']} to prefill, {timeline['decode_engine']} to decode"
    return str(timeline["prefill_engine"])


def _transfer(timeline: Mapping[str, object]) -> str:
    if _is_pair(timeline):
        return f"KV blocks of the prompt, {timeline['prefill_engine']} to {timeline['decode_engine']}"
    return "none: one engine did both"


def _drafts(drafts: Mapping[str, int]) -> str:
    right = drafts["num_accepted_tokens"]
    share, per_step = right / max(drafts["num_draft_tokens"], 1), 1 + right / max(drafts["num_drafts"], 1)
    return f"{share:.0%} of {drafts['num_draft_tokens']} drafts right, {per_step:.1f} tokens a step with drafts"


def _is_pair(timeline: Mapping[str, object]) -> bool:
    return timeline["prefill_engine"] != timeline["decode_engine"]
