"""``tokenloom run``: serves a model of a short list in a process of its own, and chats with it, until the chat ends."""

import contextlib
import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.text import Text

from tokenloom.model_files.model_path import DEMO_MODEL_NAME, PACKAGED
from tokenloom.process.uncollected_imports import uncollected_imports
from tokenloom.services.runtime.host.options import variable

from ..failures import CommandFailed, reported
from ..options import MaxTokens, Temperature, given
from ..server import Server, local_url
from ..streams import with_piped
from ..tables import Column, fitted, output_width, print_tables


@dataclass(frozen=True)
class ListedModel:
    """A model that a newcomer may begin with."""

    model: str
    """Its hub id, or the name of one that comes with the package."""
    gigabytes: float
    """Size of its download, about."""
    licence: str
    about: str
    flags: tuple[str, ...] = ()
    """Recommended flags of ``tokenloom serve``."""


_SHORTER = ("--max-model-len", "8192")
"""Less than what the model could read: one request of full length has to fit the KV cache of a small machine."""
MODELS = {
    "demo": ListedModel(DEMO_MODEL_NAME, 0.0, "Apache-2.0", "comes with the package, to try the mesh"),
    "qwen3-0.6b": ListedModel("Qwen/Qwen3-0.6B", 1.5, "Apache-2.0", "small, thinks before it answers", _SHORTER),
    "qwen3-1.7b": ListedModel("Qwen/Qwen3-1.7B", 4.1, "Apache-2.0", "thinks before it answers", _SHORTER),
    "qwen3-4b": ListedModel("Qwen/Qwen3-4B", 8.0, "Apache-2.0", "thinks before it answers", _SHORTER),
    "gemma3-1b": ListedModel("google/gemma-3-1b-it", 2.0, "Gemma terms, to accept", "many languages", _SHORTER),
    "llama3.2-1b": ListedModel(
        "meta-llama/Llama-3.2-1B-Instruct", 2.5, "Llama 3.2, to accept", "quick answers", _SHORTER
    ),
    "phi3-mini": ListedModel("microsoft/Phi-3-mini-4k-instruct", 7.6, "MIT", "reasons well for its size"),
    "smollm3-3b": ListedModel("HuggingFaceTB/SmolLM3-3B", 6.2, "Apache-2.0", "six languages", _SHORTER),
}
"""By short name. The hub gives those ``to accept`` to accounts that have accepted their terms, with HF_TOKEN."""

_SERVED = re.compile(r" served at (https?://\S+)")
_STOP_SECONDS = 20.0
_LAST_LINES = 12


def run(
    name: Annotated[
        str | None, typer.Argument(help="Short name of a model; without it, the names are listed.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Question to ask once; piped input is appended.", show_default=False)
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of the gateway; 0: a free one.")] = 0,
) -> None:
    """Download a model of a short list, serve it, chat with it, and stop it when the chat ends."""
    if name is None:
        print_tables(fitted(_columns(), output_width()))
        return
    if name not in MODELS:
        raise typer.BadParameter(_unknown(name), param_hint="NAME")
    with reported():
        question = with_piped(prompt)
    if question is None and not sys.stdin.isatty():
        raise typer.BadParameter("name a question, or pipe one in", param_hint="PROMPT")
    sampling = given(max_tokens=max_tokens, temperature=temperature)
    with reported():
        _chat(name, MODELS[name], question, system, sampling, port)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), MODELS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the list has {', '.join(MODELS)};"
    return f"{name!r} is not in the list; {hint} `tokenloom serve MODEL` serves any other model"


def _columns() -> list[Column]:
    models = MODELS.values()
    sizes = [f"{each.gigabytes:.1f} GB" if each.gigabytes else "-" for each in models]
    return [
        Column("NAME", list(MODELS)),
        Column("DOWNLOAD", sizes, Column("GB", [size.removesuffix(" GB") for size in sizes]), is_right=True),
        Column("MODEL", [each.model for each in models], rank=2),
        Column("LICENCE", [each.licence for each in models]),
        Column("", [Text(each.about, "dim") for each in models], rank=1),
    ]


def _chat(
    name: str, listed: ListedModel, question: str | None, system: str, sampling: Mapping[str, Any], port: int
) -> None:
    """Serve a model, and ask one question, or hold a conversation on the terminal.

    Args:
        name: The name that the model is served as.
        question: None: hold a conversation.
        sampling: Parameters of the requests.
        port: HTTP port; 0: a free one.

    Raises ``CommandFailed`` if the mesh does not start, and ``RequestFailed``.
    """
    with uncollected_imports():
        from ..chat.chat import ChatSession
        from ..chat.conversation import Conversation

    path = _fetched(name, listed)
    arguments = (path, "--port", str(port), "--served-model-name", name, "--disable-log-stats", *listed.flags)
    with _served(arguments) as url:
        session = ChatSession(_server(url), name, Conversation(system), dict(sampling))
        if question is None:
            session.talk()
        else:
            session.ask(question)
            print()


def _server(url: str) -> Server:
    """Return the mesh at a URL, with a key and the certificate that it has from this command's variables."""
    _, certificate = local_url(urlsplit(url).port) or (url, None)
    key = os.environ.get(variable("api_key"), "").partition(",")[0]
    return Server(url, key.strip(), certificate=certificate)


def _fetched(name: str, listed: ListedModel) -> str:
    """Return the model's directory, after its download, of which the hub's library shows the progress."""
    if listed.model not in PACKAGED:
        _say(f"{name}: {listed.model}, about {listed.gigabytes:.1f} GB once, licence {listed.licence} …")
    from ..model_directory import model_directory  # here, because the help does not need what checks a model

    path, _ = model_directory(listed.model, None, "NAME")
    return str(path)


@contextlib.contextmanager
def _served(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the URL of a mesh that ends with the block. Raises ``CommandFailed`` if it does not start."""
    from tokenloom.process import launch

    # In a process of its own: there Ctrl-C stops a mesh, and here it stops an answer. The launcher has the kernel kill
    # it with this process.
    launcher = (sys.executable, "-I", "-S", launch.__file__, str(os.getpid()))
    command = (*launcher, sys.executable, "-P", "-m", "tokenloom.cli.main", "serve", *arguments)
    _say("starting the mesh …")
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
        )
        try:
            url = _url(process, log)
            _say(f"ready after {time.monotonic() - started:.1f} s at {url}")
            yield url
        finally:
            _stop(process)


def _url(process: "subprocess.Popen[str]", log: IO[str]) -> str:
    """Return the URL once the mesh is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := _SERVED.search(line):
            return found[1]
    process.wait()
    log.seek(0)
    lines = log.read().splitlines()
    for line in lines[-_LAST_LINES:-1]:
        _say(line)
    raise CommandFailed(lines[-1].removeprefix("Error: ") if lines else "the mesh ended before it was ready")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def _say(line: str) -> None:
    """Write a line about the course of things, which is no part of an answer."""
    typer.secho(line, err=True, dim=True)
