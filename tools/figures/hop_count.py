"""Measures the hops of a request on a running mesh: runs it, and counts what its processes recorded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hops import Call, Hops, count_hops, cut, process_name, read_calls, typical, without_strays
from .mesh_run import MeshRunError, record
from .source_tree import SourceTree

REQUESTS = 9
"""Requests that are measured after the warm-up ones."""


@dataclass(frozen=True)
class HopCount:
    """Holds the request with the median number of calls, without strays, and the calls of all requests."""

    hops: Hops
    all_calls: list[int]
    """The calls of every measured request, strays included, in the order in which they were sent."""
    python: str
    """The Python version of the mesh: versions differ in what they count as a call."""


def count_on_mesh(tree: SourceTree, requests: int = REQUESTS) -> HopCount:
    """Start the mesh of the checkout and count.

    Raises ``MeshRunError`` when the mesh cannot be measured, for example because it imports another checkout.
    """
    recording = record(tree.root, requests)
    calls = _calls(tree, recording.dumps)
    if not calls:
        raise MeshRunError(f"the mesh called no function under {tree.root}; its environment imports another checkout")
    try:
        roads = [cut(calls, sent) for sent in recording.sent]
    except ValueError as error:
        raise MeshRunError(str(error)) from error
    hops = typical([count_hops(road) for road in without_strays(roads)])
    return HopCount(hops, [len(road) for road in roads], str(recording.dumps[0]["python"]))


def _calls(tree: SourceTree, dumps: list[dict[str, Any]]) -> list[Call]:
    """Return the calls of all processes into product files; processes of one name are numbered from the second on."""
    known = {source.path for source in tree.product}
    names: Counter[str] = Counter()
    calls = []
    for dump in dumps:
        name = process_name(dump["command"])
        names[name] += 1
        files = _product_files(tree.root, known, {str(function[0]) for function in dump["functions"]})
        calls += read_calls(name if names[name] == 1 else f"{name}-{names[name]}", dump, files)
    return calls


def _product_files(root: Path, known: set[str], names: set[str]) -> dict[str, str]:
    """Return the path in the checkout of each file name that is a product file. A name may lead through a link."""
    found = {}
    for name in names:
        real = Path(name).resolve()
        if real.is_relative_to(root) and (path := real.relative_to(root).as_posix()) in known:
            found[name] = path
    return found
