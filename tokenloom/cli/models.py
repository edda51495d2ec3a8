"""``tokenloom models`` lists the models of a server or the checkpoints on this machine, and says how the chat templates
of models write tool calls."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gguf.gguf_file import SUFFIX, is_later_part, read_gguf
from tokenloom.gpu_worker.checkpoint.files.config_reader import architecture_of
from tokenloom.gpu_worker.checkpoint.files.text_part import wrapper_of
from tokenloom.model_files.model_path import PACKAGED, weight_paths

from .failures import RequestFailed, reported
from .server import ApiKey, BaseUrl, Server, connect
from .tables import print_tables


@dataclass(frozen=True)
class LocalModel:
    """Describes a model on this machine, as ``--json`` prints it."""

    id: str
    """The argument for ``tokenloom serve``."""
    architecture: str
    bytes: int
    """Size of its weight files."""
    path: str
    served: str
    """``built in``, ``encoder``, ``transformers``, ``untried`` (the engine decides) or ``refused``."""
    reason: str = ""
    """Why it is refused."""
    options: str = ""
    """What `tokenloom serve` needs beside the id."""


def models(
    local: Annotated[bool, typer.Option("--local", help="List checkpoints on this machine instead.")] = False,
    folder: Annotated[
        list[Path] | None, typer.Option(help="With --local: also search this folder; may be repeated.")
    ] = None,
    templates: Annotated[
        list[Path] | None,
        typer.Option("--template", help="Say how this chat template writes tool calls instead; may be repeated."),
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of a table.")] = False,
) -> None:
    """List the models of a server or, with --local, the checkpoints on this machine; or describe chat templates."""
    with reported():
        if templates:
            rows: list[dict[str, Any]] = [_described(path) for path in templates]
        elif local:
            rows = [asdict(each) for each in checkpoints(folder or [])]
        else:
            rows = _served(connect(base_url, api_key))
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif templates:
        typer.echo("\n\n".join(map(_template_lines, rows)))
    else:
        print_tables(_local_table(rows) if local else _served_table(rows))
        for reason in [str(row["reason"]) for row in rows if row.get("reason")]:
            typer.echo(f"Refused: {reason}.")


def _served(server: Server) -> list[dict[str, Any]]:
    """Return what a server lists. Raises `RequestFailed` for an answer of another form."""
    rows = server.get("/v1/models").value().get("data")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestFailed(f"{server.url} answers /v1/models with no list of models")
    return rows


def _described(path: Path) -> dict[str, Any]:
    """Return how a chat template, of a file or a checkpoint, writes calls and reasoning. Raises `RequestFailed`."""
    from tokenloom.model_files.checkpoint import CheckpointInfo
    from tokenloom.request.chat_template import read_chat_template
    from tokenloom.services.tokenizer.output_format import TemplateReport, report

    try:
        if path.is_dir():
            info = CheckpointInfo.load(path)
            found = report(info.chat_template, info.special_tokens)
        else:
            found = report(read_chat_template(str(path)), {})
    except (ValueError, OSError) as error:
        found = TemplateReport(problem=str(error))
    return {"template": str(path), **found.members()}


def _template_lines(row: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:<12} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in row.items()
    )


def checkpoints(folders: list[Path]) -> Iterator[LocalModel]:
    """Yield the models of the package, in the hub's cache, and in `folders` (checkpoints, or folders of them)."""
    for name, path in PACKAGED.items():
        yield from _read(path, name)
    yield from _in_hub_cache()
    for folder in folders:
        for path in sorted(
            config.parent for pattern in ("config.json", "*/config.json") for config in folder.glob(pattern)
        ):
            yield from _read(path, str(path))
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            if not is_later_part(file):
                yield from _read_gguf(file)


def _read_gguf(path: Path) -> Iterator[LocalModel]:
    """Yield the model of a GGUF file, or of the first of several, unless one is broken or missing."""
    try:
        file = read_gguf(path)
        architecture = str(file.metadata.get("general.architecture", "?"))
        yield _local(str(path), architecture, sum(part.stat().st_size for part in file.parts), path)
    except (OSError, ValueError):
        return


def _in_hub_cache() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            yield from _read(newest.snapshot_path, repo.repo_id)


def _read(path: Path, name: str) -> Iterator[LocalModel]:
    """Yield the checkpoint, unless the directory has no weights or a broken config.json."""
    weights = weight_paths(path)
    try:
        config = json.loads((path / "config.json").read_text())
        named = config.get("architectures") or config.get("model_type")
        architecture = wrapper_of(config) or (architecture_of(config, str(path)) if named else "?")
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return
    if weights:
        yield _local(name, architecture, sum(file.stat().st_size for file in weights), path)


def _local(name: str, architecture: str, size: int, path: Path) -> LocalModel:
    """Return the model with the answer that `tokenloom serve` would give with no options but those it needs."""
    from tokenloom.preflight.model import answer  # here, because the help of the command needs none of it
    from tokenloom.preflight.small_files import CannotServe

    reason, choices = "", ("", "--language-model-only") if wrapper_of({"architectures": [architecture]}) else ("",)
    for options in choices:
        try:
            found = answer(path, EngineConfig(worker=WorkerConfig(language_model_only=bool(options))))
        except (CannotServe, ValueError) as error:
            reason = str(error)
        else:
            served = found.by if found.is_tried else "untried"
            return LocalModel(name, architecture, size, str(path), served, options=options)
    return LocalModel(name, architecture, size, str(path), "refused", reason, choices[-1])


def _served_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("ID", "MAX LENGTH", "OWNED BY"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(key) or "-") for key in ("id", "max_model_len", "owned_by")))
    return table


def _local_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("ID", "ARCHITECTURE", "SERVED", "SIZE", "PATH"):
        table.add_column(title, no_wrap=True, justify="right" if title == "SIZE" else "left")
    for row in rows:
        served = f"{row['served']} ({row['options']})" if row["options"] else row["served"]
        table.add_row(row["id"], row["architecture"], served, f"{row['bytes'] / 1e6:,.1f} MB", row["path"])
    return table
