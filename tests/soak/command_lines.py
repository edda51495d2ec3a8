"""``python -m tests.soak.command_lines``: every command with nonsense for every flag ends in one line.

Each seed makes one command line, and runs it in this process up to where its work begins: where processes, meshes,
models or event loops would start. An argument may be refused with one line, and nothing else: a traceback, an error of
several lines and a hang are faults. The parts' own flags are tried in the same way.
"""

import argparse
import asyncio
import contextlib
import importlib
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import typer
from huggingface_hub import constants

from tokenloom.cli import main as command
from tokenloom.cli.serve.serve_options import OFFERS, SETTINGS
from tokenloom.services.runtime.host.options import flag, options_of

SECONDS = 120
"""Processor time after which a command line counts as hanging."""
_WORK = (
    *(("tokenloom.supervisor.mesh", "fork_first"), ("tokenloom.offline.offline_loop", "make_executor")),
    *(("tokenloom.bench.engine.decode_step", "run_decode"), ("tokenloom.bench.engine.speculation", "run_speculation")),
    *(("tokenloom.bench.kv.kv_transfer", "run"), ("tokenloom.bench.scale.scale", "run")),
    *(("tokenloom.bench.peers.compare", "run_peers"), ("tokenloom.bench.regress", "run_regress")),
    *(("tokenloom.bench.shared_machine.run", "run_shared"), ("tokenloom.bench.random_model", "write_model")),
    ("tokenloom.gpu_worker.kernels.build_ahead", "build_ahead"),
)
"""Functions that begin the work of commands."""
WORDS = (
    *("", " ", "-", "--", "-1", "0", "1", "2", "7", "0.5", "-0.0", "nan", "inf", "-inf", "1e999", "1_000", "0x10"),
    *("65535", "65536", "2147483648", "18446744073709551616", "99999999999999999999999999", "9" * 5000, "٣"),
    *("none", "null", "true", "false", "auto", "all", "tokenloom-demo", "org/name", "org/name@v1", "a/b/c", "~", "."),
    *(
        "~nosuch",
        "~nosuch/x",
        "a" * 300,
        f"{'a' * 300}/{'b' * 300}",
        "é漢",
        "\udcff",
        "x\udc80.gguf",
        "a\nb",
        "\x1b[31m",
    ),
    *(
        "/dev/null",
        "/dev/full",
        "/dev/null/x",
        "/nosuch/x",
        "{}",
        "[]",
        "{",
        '{"a": [',
        '{"method": "ngram"}',
        "[" * 5000,
    ),
    *("[bold]", "[/INST]", "m[v2]", ":smile:", "%s%n", "{x}", "a,b,,", ",", "=", "a=b", "=a", "a=b=c", "$HOME", "`id`"),
    *("http://[", "https://127.0.0.1:1", "http://127.0.0.1:1/v1", "http://127.0.0.1:99999", "http://é.invalid:1"),
    *("unix:", "unix:/tmp/x", f"unix:/{'x' * 200}", "::1", "[::1]:0", "0.0.0.0:0", "127.0.0.1:1", "127.0.0.1:x", "é:1"),
    *("empty", "garbage.toml", "garbage.json", "garbage.yaml", "good.toml", "list.json", "deep.json", "table.toml"),
    *("binary.gguf", "binary", "folder", "folder/config.json", "model", "lines.jsonl", "link", "ca"),
)
"""Values of arguments; some name what :func:`_folder` makes."""


_NONSENSE = "nonsense"

PLACES = (
    *(
        "~nosuch",
        "~nosuch/x.gguf",
        "a" * 300,
        "\udcff",
        "/dev/null",
        "/dev/full",
        "/dev/null/x",
        "empty",
        "garbage.json",
    ),
    *("good.toml", "table.toml", "binary.gguf", "folder", "lines.jsonl", "link", "ca", ".", "", "org/name", "new"),
)
"""Values of arguments that name files and models."""


class Reached(BaseException):
    """The work would begin: nothing in the arguments was refused."""


class Hang(BaseException):
    """The command line took longer than it may."""


def check(seed: int) -> str:
    """Run a seed's command line, and again without each flag that it is refused for, so that the others are looked at.

    Returns how the last run ended: ``reached``, or the exit status. Raises ``AssertionError``.
    """
    rng = random.Random(seed)
    path, groups, variables = command_line(rng)
    while True:
        words = [*path, *(word for group in groups for word in group)]
        with _folder(), patch.dict(os.environ, variables), _limited():
            status, shown = (_service if path[0] in SETTINGS else _command)(words)
        _judge(status, shown, words, f"seed {seed}: {variables} tokenloom {words!r}\n{shown[-3000:]}")
        left = [group for group in groups if group[0].partition("=")[0] not in shown or not group[0].startswith("-")]
        if status != "2" or len(left) == len(groups):
            return status
        groups = left


def _judge(status: str, shown: str, words: Sequence[str], where: str) -> None:
    assert "Traceback" not in shown, where
    assert status in ("reached", "0", "1", "2", "130"), where
    lines = [line for line in shown.splitlines() if line.strip() and not line.startswith("Warning: ")]
    if status in ("1", "2") and len(words) > 1 and words[0] != "doctor":  # whose findings are lines of their own
        assert len(lines) == 1, where


def check_words(words: Sequence[str]) -> str:
    """Run one command line. Returns as :func:`check` does. Raises ``AssertionError``."""
    with _folder(), _limited():
        status, shown = _command(list(words))
    _judge(status, shown, words, f"tokenloom {words!r}\n{shown[-3000:]}")
    return status


def nonsense_for_each(group: str) -> Iterator[list[str]]:
    """Yield for a command, or for each command of a group, a line for every option and argument that holds nonsense."""
    for path, parameters in _commands():
        if path[0] != group:
            continue
        required = [_NONSENSE for each in parameters if each.param_type_name == "argument" and each.required]
        yield [*path, *required, _NONSENSE]
        yield [*path, f"--{_NONSENSE}"]
        yield [*path, f"--help={_NONSENSE}"]
        for each in parameters:
            if each.param_type_name == "option" and not each.is_flag:
                yield [*path, *required, f"{each.opts[0]}={_NONSENSE}"]


def groups() -> list[str]:
    """Return the first words of all commands."""
    return list(dict.fromkeys(path[0] for path, _ in _commands()))


def command_line(rng: random.Random) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Return a command, its arguments and flags, each with its value, and environment variables."""
    if rng.random() < 0.1:
        service = rng.choice(list(SETTINGS))
        names = list(map(flag, options_of(SETTINGS[service])))
        return [service], [[name, rng.choice(WORDS)] for name in rng.sample(names, rng.randint(0, 8))], {}
    path, parameters = rng.choice(_commands())
    groups = [each for each in _given(rng, parameters) if rng.random() < 0.95]
    variables = {}
    if path[0] in ("serve", "config") and rng.random() < 0.3:
        variable = rng.choice(list(OFFERS.values())).option.variable
        variables[variable] = rng.choice(WORDS)
    return path, groups, variables


def _given(rng: random.Random, parameters: Sequence[Any]) -> list[list[str]]:
    """Return the words of each chosen argument and flag."""
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option" and each.name != "help"]
    given = [[_word(rng, each)] for each in arguments if each.required or rng.random() < 0.5]
    given += [[_word(rng, each)] for each in arguments if each.nargs == -1 and rng.random() < 0.2]
    required = [each for each in options if each.required]
    chosen = [*required, *rng.sample(options, min(len(options), rng.choice((0, 1, 2, 4, 8, 12))))]
    for each in chosen:
        names = [*each.opts, *each.secondary_opts]
        name = rng.choice(names)
        if each.is_flag:
            given.append([name])
        else:
            word = _word(rng, each)
            given.append([f"{name}={word}"] if rng.random() < 0.3 and name.startswith("--") else [name, word])
    rng.shuffle(given)
    return given


def _word(rng: random.Random, parameter: Any) -> str:
    """Return nonsense, or sometimes what a parameter takes, so that its neighbours are looked at too."""
    choices = (parameter.metavar or "").strip("<>").split("|")
    if len(choices) > 1 and rng.random() < 0.3:
        return rng.choice(choices)
    if rng.random() < 0.15 and isinstance(parameter.default, (int, float, str)):
        return str(parameter.default)
    if (rng.random() < 0.5 and "model" in parameter.name) or "Path" in str(parameter.type_descriptor.annotation):
        return rng.choice(PLACES)
    return rng.choice(WORDS)


@cache
def _commands() -> list[tuple[list[str], list[Any]]]:
    """Return every command with its parameters."""
    found: list[tuple[list[str], list[Any]]] = []

    def walk(group: Any, path: list[str]) -> None:
        context = typer.Context(group)
        for name in group.list_commands(context):
            member = group.get_command(context, name)
            if hasattr(member, "list_commands"):
                walk(member, [*path, name])
            else:
                found.append(([*path, name], member.params))

    walk(typer.main.get_command(command.app), [])
    return found


def _command(words: list[str]) -> tuple[str, str]:
    """Run the console script. Returns how it ended, and what it wrote to standard error."""
    with patch.object(sys, "argv", ["tokenloom", *words]), _streams() as shown:
        return _ended(command.main), shown()


def _service(words: list[str]) -> tuple[str, str]:
    with _streams() as shown:
        return _ended(lambda: SETTINGS[words[0]].load(words[1:])), shown()


def _ended(run: Callable[[], object]) -> str:
    try:
        with _until_work():
            run()
    except Reached:
        return "reached"
    except SystemExit as end:
        return str(end.code or 0)
    except Hang as hang:
        traceback.print_exception(hang, file=sys.stderr)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    return "0"


@contextlib.contextmanager
def _streams() -> Iterator[Callable[[], str]]:
    """Give the command streams like those of a terminal's process; yield what reads its standard error."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(b'"a"\n{\n\xff\n'), encoding="utf-8"),
        "stdout": io.TextIOWrapper(out, encoding="utf-8", errors="strict"),
        "stderr": io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", write_through=True),
    }
    with contextlib.ExitStack() as stack:
        for name, stream in streams.items():
            stack.enter_context(patch.object(sys, name, stream))
        yield lambda: err.getvalue().decode()


@contextlib.contextmanager
def _until_work() -> Iterator[None]:
    """Let what begins a command's work raise `Reached`."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((asyncio, "run"), (time, "sleep")):
            stack.enter_context(patch.object(owner, name, _reach))
        stack.enter_context(patch.object(subprocess, "Popen", _NoProcess))
        stack.enter_context(patch.object(socket, "getaddrinfo", _resolve))
        stack.enter_context(patch.object(constants, "HF_HUB_OFFLINE", True))
        work = {getattr(importlib.import_module(module), name): name for module, name in _WORK}
        for module, name in _modules_with(work, len(sys.modules)):
            stack.enter_context(patch.object(module, name, _reach))
        yield


def _modules_with(work: Mapping[Any, str], num_modules: int) -> list[tuple[Any, str]]:
    """Return the modules that hold one of these functions, with its name; the last list while no module is added."""
    # A command line imports modules or it does not: to walk through thousands of them each time took a third of a run.
    if _found[:1] != [num_modules]:
        modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
        places = [(each, name) for each in modules for real, name in work.items() if vars(each).get(name) is real]
        _found[:] = [num_modules, places]
    found: list[tuple[Any, str]] = _found[1]
    return found


_found: list[Any] = []


def _reach(*arguments: object, **_: object) -> NoReturn:
    for each in arguments:
        if asyncio.iscoroutine(each):
            each.close()
    raise Reached


class _NoProcess(subprocess.Popen[Any]):
    """Stands for the class, which modules that a command imports name in their annotations."""

    def __init__(self, *arguments: object, **_: object) -> None:
        raise Reached


_resolve_address = socket.getaddrinfo


def _resolve(host: Any, *arguments: Any, **options: Any) -> Any:
    """Look up addresses only: no name leaves this machine."""
    if isinstance(host, str):
        host.encode("idna")
        if not host.replace(".", "").isdecimal() and ":" not in host and host != "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return _resolve_address(host, *arguments, **options)


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Work in a folder with the files that arguments name, and with a directory of meshes of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    before = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLOOM_", "OPENAI_"))}
    environment = {**before, "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder / "home")}
    _make_files(folder / "work")
    try:
        with contextlib.chdir(folder / "work"), patch.dict(os.environ, environment, clear=True):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_files(folder: Path) -> None:
    (folder / "folder").mkdir(parents=True)
    (folder / "ca").mkdir()
    (folder / "link").symlink_to("nowhere")
    texts = {
        "empty": "",
        "garbage.toml": "= [",
        "garbage.json": "{",
        "garbage.yaml": "a: [",
        "good.toml": "max_num_seqs = 4\n",
        "list.json": "[1]",
        "deep.json": "[" * 10_000,
        "table.toml": '[engine]\nmax_num_seqs = "x"\n[gateway]\nlisten = 5\n',
        "folder/config.json": '{"architectures": 5}',
        "lines.jsonl": '"a"\n{\n5\n{"prompt": 5}\n{"custom_id": "a", "url": "/v1/x", "body": {}}\n',
        "ca/ca.crt": "garbage",
        "ca/ca.key": "garbage",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("binary", "binary.gguf"):
        (folder / name).write_bytes(b"GGUF\x03\0\0\0" + bytes(range(256)))


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` in what takes too much of a processor."""

    def end(*_: object) -> NoReturn:
        raise Hang

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="print all faults, not the first only")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        try:
            ends[check(seed)] += 1
        except AssertionError as error:
            if not options.keep_going:
                raise
            ends["fault"] += 1
            print(error, flush=True)
    print(f"{options.seeds} command lines: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}")
    return 1 if ends["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
