"""Writes the blocking Python client from the one for asyncio: ``python tools/sync_client.py``.

What differs in gRPC stands in ``async_calls.py`` and ``sync_calls.py``, under the same names. The tool unasync replaces
words too, but not the sentences about event loops, and it would be a dependency for these forty lines.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "tokenloom" / "client"
_WORDS = {
    r"\basync (def|for|with)\b": r"\1",
    r"\bawait ": "",
    r"\bAwaitable\[(\w+)\]": r"\1",
    r"\b(Stop)?Async(Iterat(?:or|ion))\b": r"\1\2",
    r"\bAsync(Client|Responses|Session|Stream)\b": r"\1",
    r"\bAsync(Cancellations|Turns)\b": r"Sync\1",
    r"\basync_(\w+)": r"sync_\1",
    r"\b__a(next|iter|enter|exit)__": r"__\1__",
    r"\ba(next|iter)\(": r"\1(",
}
_SENTENCES = {
    "for asyncio": "for code that blocks",
    ", within one event loop. Cancelling a task that waits for an answer\n    cancels the request.": (
        ". May be shared by threads."
    ),
    "an ``async with``": "a ``with``",
    "Turns, one after the other,": "Turns in one thread, one after the other,",
}


def blocking() -> str:
    """Return the text of the blocking client from that of its pair."""
    text = (CLIENT / "async_client.py").read_text()
    for sentence, other in _SENTENCES.items():
        text = text.replace(sentence, other)
    for word, other in _WORDS.items():
        text = re.sub(word, other, text)
    text = f"# Generated from async_client.py by tools/sync_client.py.\n{text}"
    path = str(CLIENT / "sync_client.py")
    for command in (("check", "--quiet", "--fix", "--select", "I,F401"), ("format", "--quiet")):
        arguments = (sys.executable, "-m", "ruff", *command, "--stdin-filename", path, "-")
        text = subprocess.run(arguments, input=text, check=True, capture_output=True, text=True).stdout
    return text


if __name__ == "__main__":
    (CLIENT / "sync_client.py").write_text(blocking())
