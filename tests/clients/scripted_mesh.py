"""Serves a scripted model behind a real gateway: ``python -m tests.clients.scripted_mesh`` prints its address.

The demo model is too small to finish an agent's task. This model calls the first tool that it knows, with arguments
that make a file or ask for the weather, and reports the tool's result when it has it. It fails where a user's last turn
asks for that (``scripts/faults.py``).
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.scripts import faults
from tests.services.gateway.fakes import FakeMesh, FakeRequest, FakeTokenizer
from tokenloom.request import errors
from tokenloom.v1 import tokenizer_pb2, types_pb2

WORDS = "made by a scripted model"
"""What the file ``made.txt`` holds when the task is done."""
_COMMAND = f"echo {WORDS} > made.txt && cat made.txt"
CALLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {"city": "Oslo"},
    "Bash": {"command": _COMMAND, "description": "Make a file"},
    "bash": {"command": _COMMAND, "description": "Make a file"},
    "exec_command": {"cmd": _COMMAND},
    "shell_command": {"command": _COMMAND},
    "shell": {"command": ["bash", "-lc", _COMMAND]},
}
"""Tools of clients, and the arguments that the model passes."""
_EDIT = f"I make the file.\n\nmade.txt\n```\n<<<<<<< SEARCH\n=======\n{WORDS}\n>>>>>>> REPLACE\n```\n"
_PIECE = 7
"""Characters of a delta, so that marks and arguments arrive in parts."""
LIMITS = types_pb2.ModelLimits(
    max_model_len=1 << 20,
    vocab_size=256,
    reasoning=types_pb2.REASONING_MODE_FREE,
)


class ScriptedTokenizer(FakeTokenizer):
    """Encodes a conversation as its number."""

    async def EncodeChat(self, request: tokenizer_pb2.EncodeChatRequest, context: Any) -> Any:
        self.chats.append(request)
        prompt = str(len(self.chats) - 1).encode()
        return tokenizer_pb2.EncodeChatResponse(prompt=self._prompt(prompt, request))


def next_turn(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what the model writes, with calls in Hermes' form."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if results:
        return f"The tool says: {results[-1]}"
    for name in (tool["function"]["name"] for tool in tools):
        if (arguments := CALLS.get(name.rpartition("-")[2])) is not None:  # after a plugin's name
            call = json.dumps({"name": name, "arguments": arguments})
            return f"I call a tool.\n<tool_call>\n{call}\n</tool_call>"
    if any("SEARCH/REPLACE" in message["content"] for message in messages):
        return _EDIT
    return "Hello."


def fails(request: FakeRequest, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the request fails, or is never answered, as its last turn asks."""
    last = str(messages[-1]["content"])
    if faults.LIMITED in last:
        request.fail(errors.RateLimitExceeded("too many requests", limit="requests", retry_after=1.0))
    elif faults.AWAY in last:
        request.fail(errors.Unavailable("no engine is ready", retry_after=1.0))
    return any(words in last for words in (faults.LIMITED, faults.AWAY, faults.SILENT))


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as folder:
        mesh = FakeMesh(Path(folder))
        tokenizer = mesh.tokenizer = mesh.second_tokenizer = ScriptedTokenizer()
        mesh.coordinator.limits = LIMITS
        mesh.seconds = None
        async with mesh.gateway(tool_call_parser="hermes", reasoning_parser="qwen3"):
            print(f"http://{mesh.http_address}", flush=True)
            while True:
                request = await mesh.outputs.requests.get()
                chat = tokenizer.chats[int(bytes(request.submit.prompt.token_ids))]
                messages = json.loads(chat.messages_json)
                if fails(request, messages):
                    continue
                text = next_turn(messages, json.loads(chat.tools_json or b"[]"))
                request.answer(*(text[at : at + _PIECE] for at in range(0, len(text), _PIECE)))


if __name__ == "__main__":
    asyncio.run(main())
