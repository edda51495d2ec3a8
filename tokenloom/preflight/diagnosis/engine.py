"""Examines what computes models: packages, processor and kernels."""

import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from tokenloom.gpu_worker.kernels.levels import available_levels
from tokenloom.gpu_worker.kernels.prebuilt import FOLDER, library_name, variants

from ..packages import check_engine_packages
from .finding import Finding, from_check

_OPTIONAL = {
    "transformers": "models that are not built in (docs/reference/models.md)",
    "xgrammar": "the other library for structured outputs",
    "nixl": "KV blocks over RDMA",
}


def examine_engine() -> Iterator[Finding]:
    """Yield findings about the engine."""
    torch = f"torch {metadata.version('torch')}" if find_spec("torch") else "torch"
    yield from_check("packages", f"{torch} and the other packages of the engine are installed", check_engine_packages)
    for name, purpose in _OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding("ok", "packages", f"{name} is not installed; {purpose} would need tokenloom[{name}]")
    yield _processor()
    yield _kernels()


def _processor() -> Finding:
    levels = available_levels()
    if levels:
        return Finding("ok", "processor", f"level {levels[0].name}")
    return Finding("warn", "processor", "neither AVX2 nor Arm: models are computed slowly")


def _kernels() -> Finding:
    """Report where the kernels of the best level come from."""
    has_compiler = shutil.which("g++") is not None
    for level in available_levels():
        folder = FOLDER / level.name
        built = [variant for variant in variants() if (folder / library_name(*variant, level)).is_file()]
        if built:
            rest = "g++ compiles others" if has_compiler else "others need g++, or PyTorch's operations are used"
            return Finding("ok", "kernels", f"{len(built)} built ahead for {level.name}; {rest}")
    if has_compiler:
        return Finding("ok", "kernels", "none built ahead; g++ compiles them at the first start, and they are kept")
    return Finding("warn", "kernels", "none built ahead and no g++: install g++, or PyTorch's slower operations run")
