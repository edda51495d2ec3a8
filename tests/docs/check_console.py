"""``make docs-check``: types the console blocks of README, quick start and tutorials into a shell, in a fresh clone.

The clone has no environment yet: the first pages install one, and the tutorials go on there, as a reader does. A
command that serves stays until the page starts another one, or ends. ``--quick`` takes the environment of this checkout
instead, and leaves out what installs and builds. A command fails the check with an exit status other than 0, with a
traceback, or where the page shows an object of JSON with other keys. What cannot be typed is listed with its reason.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.docs.console_blocks import PAGES, ROOT, Typed, read_commands
from tokenloom.model_files.model_path import DEMO_MODEL

NOT_TYPED: Mapping[str, str] = {
    r"\bdocker compose\b": "needs docker; `make containers` does the same with podman",
    r"^make containers\b": "needs root and Debian's podman; a command of its own",
    r"^make test\b": ".ci/run runs it",
    r"\b(codex|claude|opencode|aider)\b": "a program of others; `make clients` runs it",
    r"^(ssh|scp)\b": "needs a second machine",
    r"^ip ": "needs root; tests/soak/network.py does the same",
    r"^export (ANTHROPIC|CLAUDE|OPENAI_API_BASE)": "a setting of such a program",
}
"""Commands that the check leaves out, each with the reason."""
_NOT_QUICK = re.compile(r"\bmake (demo|wheel)\b|\bpip install\b|-m venv\b|^~/tokenloom|weather_agent\.py|--also")
_FETCHES = re.compile(r"\bmake (demo|install|wheel)\b|\bpip install\b")
"""Commands that need the machine's network; the others run in one of their own."""
_INSTALLS = re.compile(r"^make demo\b")
_INSTEAD = {"./Qwen3-8B --max-model-len 32768": "tokenloom-demo", "10.77.0.": "127.0.0."}
"""What stands for a model, and for machines, that no test has."""
_SERVES = re.compile(r"\btokenloom serve\b")
_MACHINE = re.compile(r"^(examples/two_machines/\w+\.sh)\b")
"""A script whose parts serve beside those of the other machine."""
_TALKS = re.compile(r"\btokenloom (chat|top)( *#.*)?$")
"""Commands that stay until they are ended by a signal, but serve nothing."""
_MODELS = ("my-model", "large", "small")
"""Folders for which a reader has a model, and the check the demo model."""
_READY_SECONDS = 300.0
_TYPED_SECONDS = 3600.0
_END_SECONDS = 60.0


class Failed(Exception):
    """A command did not do what its page says."""


class Reader:
    """Types the commands of pages in one clone.

    Args:
        clone: The clone, where each command runs.
        home: The user's home folder.
        network: What runs a command in a network of its own.
    """

    def __init__(self, clone: Path, home: Path, network: tuple[str, ...]) -> None:
        self._clone = clone
        self._network = network
        self._servers: list[subprocess.Popen[str]] = []
        path = os.pathsep.join((str(clone / ".venv" / "bin"), str(home / "tokenloom" / "bin"), os.environ["PATH"]))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLOOM_", "PYTHON"))}
        sockets = home / "run"  # not the home itself, in which the quick start makes a folder `tokenloom`
        sockets.mkdir(mode=0o700)
        self._environment = {**kept, "HOME": str(home), "PATH": path, "XDG_RUNTIME_DIR": str(sockets)}
        self._environment |= {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}

    def type(self, typed: Typed) -> None:
        """Run one command. Raises `Failed`."""
        for model, other in _INSTEAD.items():
            typed = replace(typed, text=typed.text.replace(model, other))
        if script := _MACHINE.match(typed.text):
            parts = re.findall(r"^part ", (self._clone / script[1]).read_text(), re.MULTILINE)
            self._serve(typed, " serving on ", len(parts))
        elif _SERVES.search(typed.text):
            self.end()
            self._serve(typed, " served at ", 1)
        elif _TALKS.search(typed.text):
            self._check(typed, *self._run(typed.text, "What is prefill?\n"))
        else:
            self._check(typed, *self._run(typed.text, ""))

    def install(self, page: str) -> None:
        """Install what a page expects that begins where the quick start ends. Raises `Failed`."""
        if not (self._clone / ".venv").exists():
            self.type(Typed(page, 0, "make install"))

    def end(self) -> None:
        """Stop what still serves, as Ctrl-C does. Raises `Failed` for what goes on all the same, and kills it."""
        deaf = []
        while self._servers:
            server = self._servers.pop()
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is what failed
                os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
                deaf.append(str(server.args))
        if deaf:
            raise Failed(f"not ended by Ctrl-C within {_END_SECONDS:g} s: {'; '.join(deaf)}")

    def _run(self, text: str, given: str) -> tuple[int, str]:
        done = subprocess.run(
            [*(() if _FETCHES.search(text) else self._network), "bash", "-c", text],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._clone,
            env=self._environment,
            timeout=_TYPED_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout

    def _serve(self, typed: Typed, ready: str, times: int) -> None:
        """Start a command, and wait until it has printed ``ready`` so many times."""
        with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
            server = subprocess.Popen(
                [*self._network, "bash", "-c", typed.text.removesuffix("&")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._clone,
                env=self._environment,
                process_group=0,
            )
            self._servers.append(server)
            deadline = time.monotonic() + _READY_SECONDS
            while (shown := Path(log.name).read_text()).count(ready) < times:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"{typed.place}: {typed.text}\n{shown[-2000:]}")
                time.sleep(0.2)

    def _check(self, typed: Typed, status: int, shown: str) -> None:
        where = f"{typed.place}: {typed.text}\nexit status {status}\n{shown[-2000:]}"
        if status or "Traceback" in shown:
            raise Failed(where)
        for line in typed.printed:
            if line.startswith("{") and _keys(line) not in [_keys(each) for each in shown.splitlines()]:
                raise Failed(f"the page shows an object with other keys\n{where}")


def _keys(line: str) -> object:
    """Return the shape of an object of JSON without its values; None for another line."""

    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {name: shape(each) for name, each in value.items()}
        return [shape(each) for each in value[:1]] if isinstance(value, list) else None

    try:
        return shape(json.loads(line))
    except ValueError:
        return None


def reason_against(typed: Typed, *, quick: bool) -> str | None:
    """Return why a command is left out; None: it is typed."""
    if quick and _NOT_QUICK.search(typed.text):
        return "installs or builds, or needs another model: without --quick only"
    return next((reason for pattern, reason in NOT_TYPED.items() if re.search(pattern, typed.text)), None)


@contextlib.contextmanager
def cloned(*, quick: bool) -> Iterator[tuple[Path, Path]]:
    """Yield a fresh clone of the last commit, and a home without any settings."""
    folder = Path(tempfile.mkdtemp(prefix="tl-docs-"))
    clone, home = folder / "clone", folder / "home"
    try:
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
        for name in _MODELS:
            shutil.copytree(DEMO_MODEL, clone / name)
        if quick:
            (clone / ".venv" / "bin").mkdir(parents=True)
            command = f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}" -P -m tokenloom.cli.main "$@"\n'
            python = f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}" "$@"\n'
            for name, text in (("tokenloom", command), ("python", python), ("python3", python)):
                (clone / ".venv" / "bin" / name).write_text(text)
                (clone / ".venv" / "bin" / name).chmod(0o755)
        yield clone, home
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def own_network() -> Iterator[tuple[str, ...]]:
    """Yield what runs a command in a network of its own, where every port of the pages is free; nothing if this
    machine does not allow it."""
    # `cat` keeps the network until its input closes, which also happens when this process is killed.
    keeper = ("unshare", "--map-root-user", "--net", "sh", "-c", "ip link set lo up && echo made && exec cat")
    try:
        kept = subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        yield ()
        return
    with kept:
        assert kept.stdout is not None
        made = kept.stdout.readline() == b"made\n"
        yield ("nsenter", f"--target={kept.pid}", "--user", "--net", "--preserve-credentials") if made else ()


def check(reader: Reader, page: str, *, quick: bool) -> Iterator[tuple[Typed, str | None]]:
    """Type a page's commands. Yields each with the reason for which it was left out. Raises `Failed`."""
    commands = read_commands(page)
    if not quick and not any(_INSTALLS.search(typed.text) for typed in commands):
        reader.install(page)
    try:
        for typed in commands:
            reason = reason_against(typed, quick=quick)
            if reason is None:
                reader.type(typed)
            yield typed, reason
    finally:
        reader.end()


def failed_pages(pages: Iterable[str], *, quick: bool) -> list[str]:
    """Type the commands of pages, and print what became of each. Returns the pages that failed."""
    failed = []
    with cloned(quick=quick) as (clone, home), own_network() as network:
        reader = Reader(clone, home, network)
        for page in pages:
            try:
                for typed, reason in check(reader, page, quick=quick):
                    state, why = ("typed", "") if reason is None else ("left out", f" ({reason})")
                    print(f"{state:<9} {typed.place}: {typed.text.splitlines()[0][:90]}{why}", flush=True)
            except Failed as error:
                failed.append(page)
                print(f"FAILED    {error}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use this environment, and install and build nothing")
    parser.add_argument("pages", nargs="*", default=PAGES)
    options = parser.parse_args()
    return 1 if failed_pages(options.pages, quick=options.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
