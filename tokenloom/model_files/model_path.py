"""Finds the files of a model by its name. It imports little: every command that takes a model does."""

import os
from importlib import resources
from pathlib import Path

from ..gguf.gguf_file import SUFFIX, is_gguf
from ..request.errors import NotFound
from .hub_files import HubCache, download, hub_id

DEMO_MODEL = Path(str(resources.files("tokenloom.demo_model")))
"""The checkpoint that comes with the package."""
DEMO_ADAPTERS = Path(str(resources.files("tokenloom.demo_adapters")))
"""The LoRA adapters of that checkpoint that come with the package, each in a directory of its name."""
DEMO_MODEL_NAME = "tokenloom-demo"
"""The name under which it is served and requested."""


def resolve(model: str, *, weights: bool = True, cache: HubCache | None = None) -> Path:
    """Return the directory of the demo model, of a local checkpoint, or of a hub id (cached or downloaded), or the path
    of a GGUF file.

    A hub id may end in ``@revision``. Without ``weights`` only the files that describe the model are downloaded, into
    ``cache``. Raises ``NotFound``.
    """
    path = DEMO_MODEL if model == DEMO_MODEL_NAME else expanded(model)
    if is_checkpoint(path):
        return path.resolve()
    if os.path.isdir(path):
        files = ", ".join(sorted(file.name for file in path.glob(f"*{SUFFIX}")))
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
    if path.resolve() == DEMO_MODEL.resolve():
        return DEMO_MODEL_NAME
    if is_gguf(path):
        return path.stem
    return hub_id(model) if model and not os.path.exists(expanded(model)) else path.name
