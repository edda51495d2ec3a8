"""How much of each turn of real coding agents comes from the cache: ``python -m tests.clients.agent_turns [NAME…]``.

Each agent works on a small task, whose tools it runs itself, against a real mesh with the demo model's tokenizer and
chat template, a context of 262,144 tokens and a scripted model. Prints a table, writes each agent's output and bodies
to ``build/clients/logs``, and fails where a turn found less than ``WANTED`` of the prompt before it, or of what the
agent left of that.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.clients import environments
from tests.clients.agents import AGENTS, NOTES, Agent
from tests.clients.relay import Exchange, relaying
from tests.clients.run import LOGS
from tests.clients.scripted_worker import Script, ScriptedWorker
from tests.engine_core.client.inproc import AsyncInprocClient
from tests.mesh.harness import MODEL, Mesh, Part
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.service import EngineService
from tokenloom.services.tokenizer.service import TokenizerService
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings

MAX_MODEL_LEN = 262_144
WANTED = 0.95
"""Of the previous prompt, from the second turn on."""
MIN_TURNS = 5
TIMEOUT = 300.0
"""Seconds for one agent."""


class ScriptedMesh(Mesh):
    """One engine with the demo model's checkpoint, whose context is long, and a model that writes what ``script`` says
    to a prompt. ``gateway``: settings of the gateway."""

    def __init__(self, directory: Path, script: Script, gateway: dict[str, Any]) -> None:
        self._model = _with_long_context(directory / MODEL)
        self._script = script
        super().__init__(directory, gateway=gateway)

    def _tokenizer(self, index: int) -> Part:
        settings = TokenizerSettings.of(
            **self._common(f"tokenizer-{index}"), render_workers=1, model=str(self._model), served_model_name=MODEL
        )
        return Part(TokenizerService, settings)

    def new_engine(self, index: int) -> Part:
        """Returns an engine that is not started yet."""
        settings = EngineSettings.of(
            **self._common(f"engine-{index}"),
            worker="hash",
            coordinator=self.address("coordinator-0"),
            model=str(self._model),
            served_model_name=MODEL,
            num_kv_blocks=1 << 15,
            max_num_batched_tokens=8192,
        )
        return Part(self._make_engine, settings)

    def _make_engine(self, settings: EngineSettings) -> EngineService:
        config = settings.engine_config(str(self._model))
        worker = ScriptedWorker(config, self._script)
        return EngineService(settings, AsyncInprocClient(config, UniProcExecutor(worker)))


def _with_long_context(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    return folder


async def work(agent: Agent, out: Path, logs: Path, gateway: dict[str, Any]) -> tuple[str, list[Exchange]]:
    """Run an agent to the end of its task; its version, and its turns."""
    client = agent.client
    interpreter = await asyncio.to_thread(environments.interpreter, client)
    version = await asyncio.to_thread(environments.version, client, interpreter)
    folder, home = out / "work", out / "home"
    # A mesh for each agent: none finds what another one has left.
    mesh = ScriptedMesh(out, agent.script(folder), gateway)
    async with mesh.running(), relaying(mesh.url) as (relay, url):
        values = {"url": url, "model": MODEL, "home": str(home)}
        _write_files(folder, {"notes.txt": NOTES})
        _write_files(home, {name: text.format(**values) for name, text in agent.files.items()})
        own = {name: value.format(**values) for name, value in agent.environment.items()}
        environment = {**os.environ, "HOME": str(home), "PWD": str(folder), "NO_COLOR": "1", **own}
        program = interpreter / "node_modules" / ".bin" / agent.program if agent.program else interpreter
        command = [str(program), *(argument.format(**values) for argument in agent.command)]
        log = logs / f"{agent.name}.turns.log"
        await asyncio.to_thread(_run, command, folder, environment, agent.stdin, log)
    (logs / f"{agent.name}.bodies.json").write_text(json.dumps([each.body for each in relay.exchanges]))
    return version, [each for each in relay.exchanges if each.usage and agent.is_turn(each.body)]


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], stdin: str, log: Path) -> None:
    with log.open("wb") as output:
        subprocess.run(
            command, cwd=folder, env=environment, input=stdin.encode(), stdout=output, stderr=output, timeout=TIMEOUT
        )


def rows(name: str, turns: Sequence[Exchange]) -> list[str]:
    """Of the table: one for each turn."""
    found = [""] + [f"{share(*pair):.1%}" for pair in pairwise(turns)]
    return [
        f"| {name} | {number} | {turn.prompt_tokens} | {turn.cached_tokens} | {part} | {_cause(turn)} |"
        for number, (turn, part) in enumerate(zip(turns, found, strict=True), 1)
    ]


def share(before: Exchange, turn: Exchange) -> float:
    """Return which part of the prompt before was cached."""
    return min(turn.cached_tokens / before.prompt_tokens, 1.0)


def _cause(turn: Exchange) -> str:
    miss = turn.miss
    return f"`{miss['cause']}` at {miss.get('token', 0)}, {miss.get('missed_tokens', 0)} missed" if miss else ""


def failures(agent: Agent, turns: Sequence[Exchange]) -> list[str]:
    """What is not as it should be."""
    if len(turns) < MIN_TURNS:
        return [f"{agent.name} took {len(turns)} turns"]
    wrong = []
    for number, (before, turn) in enumerate(pairwise(turns), 2):
        findable = before.prompt_tokens
        if agent.rewrites and turn.miss.get("cause") == "message_changed":
            findable = min(findable, turn.miss["token"])
        if turn.cached_tokens < WANTED * findable:
            wrong.append(f"{agent.name}, turn {number}: {turn.cached_tokens} of {findable} tokens, {turn.miss}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents to run; all by default")
    parser.add_argument("--log", type=Path, default=LOGS)
    parser.add_argument("--volatile-lines", default="move", choices=("move", "keep"), help="as the gateway has it")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {agent.client.name for agent in AGENTS}:
        parser.error(f"no agent named {', '.join(unknown)}")
    arguments.log.mkdir(parents=True, exist_ok=True)
    lines = ["| client | turn | prompt tokens | cached | of the previous prompt | miss |", "|---|---|---|---|---|---|"]
    wrong: list[str] = []
    for agent in (each for each in AGENTS if not arguments.names or each.client.name in arguments.names):
        gateway = {"volatile_lines": arguments.volatile_lines}
        with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as out:
            version, turns = asyncio.run(work(agent, Path(out), arguments.log, gateway))
        lines += rows(f"{agent.client.name} {version}{agent.name.removeprefix(agent.client.name)}", turns)
        wrong += failures(agent, turns)
    print("\n".join(lines))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
