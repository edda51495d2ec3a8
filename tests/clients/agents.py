"""Coding agents and the tasks that a scripted model works through with each: its calls, in the agent's own tools."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.clients.table import CLIENTS, Client

_CLIENTS = {client.name: client for client in CLIENTS}
TASK = "Work through the plan in notes.txt."
NOTES = "".join(f'{index}. Check point »{index}« of the plan, and "write" what comes of it.\n' for index in range(40))
SOURCE = 'def greet(name: str) -> str:\n\treturn f"Grüße, {name}! \\\\ 100 %"\n'
"""What the model writes: quotes, escapes, a tab and letters that JSON may or may not escape."""
DONE = "All points are done."
_ASKED = "Do step"
_NUM_EDITS = 6
Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Agent:
    """One that users have.

    Attributes:
        client: Where it is installed from.
        command: Its arguments after the interpreter or program; {model} and {url} are filled in.
        calls: The model's calls in a folder; none: it edits by blocks of text, one for each line of ``stdin``.
        program: Under ``node_modules/.bin``; empty: a module of its Python.
        environment: Variables; {home}, {model} and {url} are filled in.
        files: In its home, by path.
        stdin: What a user types.
        setting: What is not as the agent comes.
        rewrites: The agent changes the end of each prompt in the next one, so that only the rest can be found.
    """

    client: Client
    command: Sequence[str]
    calls: Callable[[Path], Sequence[Call]]
    program: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    setting: str = ""
    rewrites: bool = False

    @property
    def name(self) -> str:
        return f"{self.client.name}, {self.setting}" if self.setting else self.client.name

    def script(self, folder: Path) -> Callable[[str], str]:
        """Return the model: the n-th call after n results, and a last word after all of them."""
        calls = self.calls(folder)
        return lambda prompt: _next_call(prompt, calls) if calls else _next_edit(prompt)

    def is_turn(self, body: Mapping[str, Any]) -> bool:
        """Whether a request is a turn of the task: agents also ask for titles, without tools."""
        return bool(body.get("tools")) if not self.stdin else _ASKED in json.dumps(body)


def _next_call(prompt: str, calls: Sequence[Call]) -> str:
    if (turn := prompt.count("<|im_start|>tool\n")) >= len(calls) or "<tools>" not in prompt:
        return DONE
    name, arguments = calls[turn]
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"I do point {turn}.\n<tool_call>\n{call}\n</tool_call>"


def _next_edit(prompt: str) -> str:
    step = int(re.findall(rf"{_ASKED} (\d+)", prompt)[-1])
    then, now = "" if step == 1 else f"STEP = {step - 1}\n", f"STEP = {step}\n"
    made = now if then else now + SOURCE
    return f"I do step {step}.\n\nmade.py\n```python\n<<<<<<< SEARCH\n{then}=======\n{made}>>>>>>> REPLACE\n```\n"


def _claude_calls(folder: Path) -> Sequence[Call]:
    notes, made = str(folder / "notes.txt"), str(folder / "made.py")
    return (
        ("Read", {"file_path": notes}),
        ("Write", {"file_path": made, "content": SOURCE}),
        ("Bash", {"command": 'wc -l notes.txt && grep -c "def" made.py', "description": "Count lines"}),
        ("Edit", {"file_path": made, "old_string": "Grüße", "new_string": 'Hi "there"'}),
        ("Read", {"file_path": made}),
        ("Write", {"content": "éü\n", "file_path": str(folder / "other.txt")}),
        ("Bash", {"command": "cat made.py other.txt"}),
    )


def _codex_calls(folder: Path) -> Sequence[Call]:
    commands = (
        "cat notes.txt",
        f"cat > made.py <<'END'\n{SOURCE}END",
        'wc -l notes.txt && grep -c "def" made.py',
        "sed -i 's/Grüße/Hi \"there\"/' made.py",
        "cat made.py",
        "printf 'éü\\n' > other.txt",
        "cat made.py other.txt",
    )
    return [("exec_command", {"cmd": command}) for command in commands]


def _opencode_calls(folder: Path) -> Sequence[Call]:
    notes, made = str(folder / "notes.txt"), str(folder / "made.py")
    return (
        ("read", {"filePath": notes}),
        ("write", {"filePath": made, "content": SOURCE}),
        ("bash", {"command": 'wc -l notes.txt && grep -c "def" made.py', "description": "Count lines"}),
        ("edit", {"filePath": made, "oldString": "Grüße", "newString": 'Hi "there"'}),
        ("read", {"filePath": made}),
        ("write", {"content": "éü\n", "filePath": str(folder / "other.txt")}),
        ("bash", {"command": "cat made.py other.txt", "description": "Show both"}),
    )


_CODEX_CONFIG = """model = "{model}"
model_provider = "tokenloom"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.tokenloom]
name = "Tokenloom"
base_url = "{url}/v1"
env_key = "TOKENLOOM_API_KEY"
wire_api = "responses"
"""
_OPENCODE_CONFIG = """{{"autoupdate": false, "share": "disabled", "permission": "allow", "provider": {{"tokenloom": {{
    "npm": "@ai-sdk/openai-compatible", "options": {{"baseURL": "{url}/v1", "apiKey": "none"}},
    "models": {{"{model}": {{"limit": {{"context": 262144, "output": 8192}}}}}}}}}}}}"""
_AIDER = Agent(
    _CLIENTS["aider"],
    (
        *("-m", "aider", "--model", "openai/{model}", "--edit-format", "diff", "--yes-always", "--no-git"),
        *("--no-stream", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"),
        *("--analytics-disable", "--no-pretty", "--no-fancy-input", "--map-tokens", "0", "--no-suggest-shell"),
    ),
    lambda folder: (),
    environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"},
    stdin="".join(f"{_ASKED} {step} of the plan.\n" for step in range(1, _NUM_EDITS + 1)),
    rewrites=True,
)
_RULES_ONCE = "- name: openai/{model}\n  edit_format: diff\n  reminder: none\n"
"""Without it aider repeats the rules of its system prompt in the last message, which loses them in the next turn."""
_CLAUDE_CODE = Agent(
    _CLIENTS["Claude Code"],
    ("-p", TASK, "--allowedTools", "Bash,Read,Write,Edit", "--model", "{model}"),
    _claude_calls,
    program="claude",
    environment={
        "CLAUDE_CONFIG_DIR": "{home}",
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    },
)
_WITH_HASH = replace(
    _CLIENTS["Claude Code"],
    script="claude_code_hash_client.mjs",
    requirements=("@anthropic-ai/claude-code@2.1.177",),
)
"""An older one that writes ``cch`` for every host; later ones write it for Anthropic's only."""
AGENTS = (
    _CLAUDE_CODE,
    replace(_CLAUDE_CODE, client=_WITH_HASH, setting="with cch"),
    Agent(
        _CLIENTS["Codex CLI"],
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        _codex_calls,
        program="codex",
        environment={"CODEX_HOME": "{home}", "TOKENLOOM_API_KEY": "none"},
        files={"config.toml": _CODEX_CONFIG},
    ),
    Agent(
        _CLIENTS["OpenCode"],
        ("run", "--model", "tokenloom/{model}", TASK),
        _opencode_calls,
        program="opencode",
        environment={
            "XDG_CONFIG_HOME": "{home}",
            "XDG_DATA_HOME": "{home}/data",
            "XDG_CACHE_HOME": "{home}/cache",
            "XDG_STATE_HOME": "{home}/state",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        files={"opencode/opencode.json": _OPENCODE_CONFIG},
    ),
    _AIDER,
    replace(_AIDER, setting="rules once", files={".aider.model.settings.yml": _RULES_ONCE}),
)
