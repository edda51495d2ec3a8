"""``tokenloom fetch`` downloads a model once, for all parts of a mesh that share a volume."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.request.errors import NotFound

from .failures import CommandFailed, reported

_POLL_SECONDS = 0.5


def fetch(
    model: Annotated[
        str, typer.Argument(help="Hub id (org/name or org/name@revision), or a path, for which nothing is downloaded.")
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit, in place of @revision.")] = "",
    into: Annotated[Path | None, typer.Option(help="Hub cache to download into; by default HF_HUB_CACHE.")] = None,
    weights: Annotated[bool, typer.Option(help="Also fetch the weights; only engines need them.")] = True,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Download nothing; wait up to this number of seconds until another process has fetched the model.",
        ),
    ] = None,
) -> None:
    """Download a model from the Hugging Face hub, or from the mirror that HF_ENDPOINT names, and print its directory.

    Parts whose HF_HUB_CACHE is the same folder find the model under its hub id. Files that the cache holds are not sent
    again. A token for the hub is read from HF_TOKEN, or from the file that HF_TOKEN_PATH names.
    """
    # Imported here: the hub's library would slow the start of every other command.
    from tokenloom.model_files.model_path import HubCache, resolve

    named = f"{model}@{revision}" if revision else model
    with reported():
        if revision and "@" in model:
            raise typer.BadParameter("MODEL names a revision already", param_hint="--revision")
        cache = HubCache(into, cached_only=wait is not None)
        find = functools.partial(resolve, named, weights=weights, cache=cache)
        try:
            path = find() if wait is None else _wait_for(find, wait)
        except NotFound as error:
            raise CommandFailed(error.message) from None
    print(path)


def _wait_for(find: Callable[[], Path], seconds: float) -> Path:
    """Return what ``find`` returns, once it raises no ``NotFound``; raise its last one after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return find()
        except NotFound:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_SECONDS)
