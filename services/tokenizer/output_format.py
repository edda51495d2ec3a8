"""Reads from a chat template how the model's output calls tools, and whether it reasons first.

The signs are what the template writes for past turns. The names are those of the gateway's parsers, as in vLLM.
"""

from tokenloom.request.reasoning import THINK_START

# What a template that supports tools writes around its calls or, for Llama 3, around every turn.
_TOOL_CALL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3_json"),
)
# Marks of families whose tool calls are not JSON.
_OTHER_TOOL_FORMATS = ("<function=", "<arg_key>", "<invoke ")


def tool_call_parser(template: str) -> str:
    """Return the name of the parser for the calls that the template writes; empty when that is not clear."""
    if "tool_calls" not in template or any(mark in template for mark in _OTHER_TOOL_FORMATS):
        return ""
    found = [name for mark, name in _TOOL_CALL_MARKS if mark in template]
    # The template shows how past calls are written, so no operator has to name the parser. With two formats, or none, a
    # guess would turn text into calls, and the operator chooses.
    return found[0] if len(found) == 1 else ""


def opens_reasoning(rendered: str) -> bool:
    """Return whether a rendered conversation ends with the opening of the model's reasoning."""
    return rendered[-len(THINK_START) - 8 :].rstrip().endswith(THINK_START)
