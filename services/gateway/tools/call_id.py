"""Names of calls, by which a tool's answer is told apart from another's."""

import secrets


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"
