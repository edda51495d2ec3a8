"""Finds the files of a model by its name, on this machine or on the Hugging Face hub, whose files it fetches.

It imports little: every command that takes a model imports it.
"""

import glob
import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..gguf.gguf_file import SUFFIX, is_gguf, is_later_part, whole_stem
from ..request.errors import NotFound, Unavailable

_DESCRIPTION = ("*.json", "*.jinja", "*.txt")
_SAFETENSORS = "*.safetensors"
_PICKLED = "pytorch_model*.bin"
_WHOLE, _PARTS = "model.safetensors", "model-*.safetensors"
"""The files of weights that an engine reads in a directory without an index."""


@dataclass(frozen=True)
class HubCache:
    """Says where a download goes, and whether there may be one.

    Attributes:
        directory: The cache; None: the one that ``HF_HUB_CACHE`` names, in ``~/.cache/huggingface`` by default.
        cached_only: Download nothing: use what the cache holds.
    """

    directory: Path | None = None
    cached_only: bool = False


def weight_paths(path: Path) -> list[Path]:
    """Return the files of a directory that hold weights: safetensors or, only without them, ``pytorch_model*.bin``."""
    return sorted(path.glob(_SAFETENSORS)) or sorted(path.glob(_PICKLED))


def hub_id(model: str) -> str:
    """Return the hub id of ``org/name`` or ``org/name@revision``."""
    return model.partition("@")[0]


def download(model: str, *, weights: bool = True, cache: HubCache | None = None) -> Path:
    """Return the directory of ``org/name`` or ``org/name@revision``, cached or downloaded.

    Without ``weights`` only the files that describe the model are needed, and only these are downloaded. A directory
    from which an interrupted or running download still misses files is not returned. Raises ``NotFound``, and
    ``Unavailable`` if the hub does not answer.
    """
    cache = cache or HubCache()
    path = _snapshot(model, (), cache)
    if weights:
        commit = path.name  # the weights are those of the files that say which are needed
        path = _snapshot(model, _weight_patterns(path), cache, commit)
    if weights and not any(path.glob(_SAFETENSORS)):
        path = _snapshot(model, (_PICKLED,), cache, commit)
        # A cache in which only the description of a model was fetched looks complete to the hub's library.
        if not weight_paths(path):
            raise NotFound(
                f"model {model!r}: the hub's repository has no weights in files that an engine reads: {_WHOLE} or "
                f"{_PARTS}, those that {_WHOLE}.index.json names, or {_PICKLED}",
                field="model",
            )
    if not (path / "config.json").is_file():
        raise NotFound(f"model {model!r}: the hub's repository has no config.json", field="model")
    return path


def _weight_patterns(path: Path) -> tuple[str, ...]:
    """Return the patterns of the safetensors files that an engine reads, of a directory that has the files describing
    the model.

    A repository may hold the same weights once more: in the format of their authors (``consolidated.safetensors``, the
    folder ``original``), or for other programs.
    """
    index, modules = _read_json(path / f"{_WHOLE}.index.json"), _read_json(path / "modules.json")
    of_index = index.get("weight_map") if isinstance(index, dict) else None
    names = set(map(str, of_index.values())) if isinstance(of_index, dict) else set()
    patterns = [_WHOLE, *(map(glob.escape, sorted(names)) if names else (_PARTS,))]
    # Layers behind the model, as sentence-transformers lists them: each in a folder of its own, in either format.
    for module in modules if isinstance(modules, list) else ():
        if folder := str(module.get("path") or "") if isinstance(module, dict) else "":
            patterns += [f"{glob.escape(folder)}/{name}" for name in (_SAFETENSORS, _PICKLED)]
    return tuple(patterns)


def _read_json(path: Path) -> object:
    """Return what a file holds; None if it is missing or no JSON, which is refused where the file is read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _snapshot(model: str, patterns: tuple[str, ...], cache: HubCache, commit: str = "") -> Path:
    """Return the directory with a hub's files that match the patterns, and those that describe the model. ``commit``:
    of the hub's repository; empty: the one that the model's revision names now."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id(model),
                revision=commit or model.partition("@")[2] or None,
                allow_patterns=[*_DESCRIPTION, *patterns],
                cache_dir=cache.directory,
                # In containers one job downloads and the parts only wait for its files: otherwise each of them would
                # fetch the same weights, and need a token and a way out of the cluster.
                local_files_only=cache.cached_only,
            )
        )
    except (OSError, ValueError, RuntimeError) as error:
        text = f"model {model!r}: no such directory, and "
        if reason := _missing(model, error):
            raise NotFound(text + reason, field="model") from None
        raise Unavailable(text + _out_of_reach(error), field="model") from None


def _missing(model: str, error: Exception) -> str:
    """Return why the hub, or the cache, has no files, and what would help; empty: the hub could not be asked."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"the hub gives {hub_id(model)} only to accounts that accepted its terms: set HF_TOKEN or HF_TOKEN_PATH"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {hub_id(model)}, or needs a token for it (HF_TOKEN or HF_TOKEN_PATH)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's {hub_id(model)} has no revision {model.partition('@')[2]!r}"
    if isinstance(error, errors.HFValidationError):
        return f"{hub_id(model)!r} is not a hub id such as org/name"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return f"the cache {constants.HF_HUB_CACHE} does not hold it (HF_HUB_OFFLINE=1 forbids downloads)"
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is None:
        return "the cache does not hold all of its files"
    return ""


def _out_of_reach(error: BaseException) -> str:
    """Return why the hub could not be asked, by the innermost cause, and what would help."""
    from huggingface_hub import constants

    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    is_chosen = constants.HUGGINGFACE_CO_URL_HOME.rstrip("/") != constants.ENDPOINT
    named = "HF_ENDPOINT names this hub" if is_chosen else "HF_ENDPOINT may name a mirror"
    return (
        f"it cannot be downloaded from {constants.ENDPOINT} ({said or type(error).__name__}): check network and proxy; "
        f"{named}"
    )


DEMO_MODEL = Path(str(resources.files("tokenloom.demo_model")))
"""The checkpoint that comes with the package."""
DEMO_ADAPTERS = Path(str(resources.files("tokenloom.demo_adapters")))
"""The LoRA adapters of that checkpoint that come with the package, each in a directory of its name."""
DEMO_MODEL_NAME = "tokenloom-demo"
"""The name under which it is served and requested."""
PICTURE_MODEL_NAME = "tokenloom-picture"
"""The name of a small model that comes with the package and answers about pictures of shapes."""
PACKAGED = {DEMO_MODEL_NAME: DEMO_MODEL, PICTURE_MODEL_NAME: DEMO_MODEL / "picture"}
"""The checkpoints that come with the package, by the names under which they are served."""


def resolve(model: str, *, weights: bool = True, cache: HubCache | None = None) -> Path:
    """Return the directory of a model of ``PACKAGED``, of a local checkpoint, or of a hub id (cached or downloaded), or
    the path of a GGUF file.

    A hub id may end in ``@revision``. Without ``weights`` only the files that describe the model are downloaded, into
    ``cache``. Raises ``NotFound``, and ``Unavailable`` if the hub does not answer.
    """
    path = PACKAGED.get(model) or expanded(model)
    if is_gguf(path) and is_checkpoint(path):
        return path.parent.resolve() / path.name  # in the hub's cache it links to a blob, whose name says nothing
    if is_checkpoint(path):
        return path.resolve()
    if os.path.isdir(path):
        files = ", ".join(sorted(file.name for file in path.glob(f"*{SUFFIX}") if not is_later_part(file)))
        way_out = f"; name one of its GGUF files: {files}" if files else ""
        raise NotFound(f"model {model!r}: the directory has no config.json{way_out}", field="model")
    if model.startswith((".", "/", "~")) or hub_id(model).count("/") > 1 or model.endswith(SUFFIX):
        raise NotFound(f"model {model!r}: no such directory or {SUFFIX} file", field="model")
    return download(model, weights=weights, cache=cache)


def expanded(path: str | Path) -> Path:
    """Return a path with the user's home directory for ``~``; a user that is not known stays, as in a shell."""
    return Path(os.path.expanduser(path))


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is that of a checkpoint directory or of a GGUF file."""
    return os.path.isfile(path if is_gguf(path) else path / "config.json")


def served_name(path: Path, model: str = "") -> str:
    """Return the default name for clients: the hub id, the last part of the directory, or a GGUF file's stem."""
    for name, packaged in PACKAGED.items():
        if path.resolve() == packaged.resolve():
            return name
    if is_gguf(path):
        return whole_stem(path)
    return hub_id(model) if model and not os.path.exists(expanded(model)) else path.name
