"""What a chat template tells of the model's output: how it calls tools, and whether it reasons first.

A template says so by what it writes for past turns. The names are those of the gateway's parsers, which are vLLM's too.
"""

THINK_START, THINK_END = "<think>", "</think>"

# What a template that knows tools writes around its calls or, for Llama 3, around every turn.
_TOOL_CALL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3_json"),
)
# Families that use one of those marks around something else than JSON.
_OTHER_TOOL_FORMATS = ("<function=", "<arg_key>", "<invoke ")


def tool_call_parser(template: str) -> str:
    """Name of the parser for the calls that the template writes; empty when that is not clear."""
    if "tool_calls" not in template or any(mark in template for mark in _OTHER_TOOL_FORMATS):
        return ""
    found = [name for mark, name in _TOOL_CALL_MARKS if mark in template]
    return found[0] if len(found) == 1 else ""


def reasoning_parser(template: str) -> str:
    """Name of the parser for the reasoning that the template knows; empty when it knows none."""
    return "qwen3" if THINK_END in template or THINK_START in template else ""


def opens_reasoning(rendered: str) -> bool:
    """Whether a conversation ends with the opening of the model's reasoning."""
    return rendered[-len(THINK_START) - 8 :].rstrip().endswith(THINK_START)
