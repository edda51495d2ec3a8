"""Divides the package into the client's wheel and the rest, and that into a wheel for each kind of machine."""

import copy
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from email.message import Message
from pathlib import Path, PurePosixPath

from .closure import modules_of
from .wheel_file import Wheel

PACKAGE = "tokenloom"
CLIENT = "tokenloom-client"
CLIENT_ROOTS = (f"{PACKAGE}.client", f"{PACKAGE}.v1")
"""What the client's wheel holds, with every module of the package that they import."""
CLIENT_NEEDS = ("googleapis-common-protos", "grpcio", "msgspec", "protobuf")
"""The requirements of the package that the client has too."""
_STUBS = f"{PACKAGE}/v1/"
_KERNELS = f"{PACKAGE}/gpu_worker/kernels/prebuilt/"
_LEAST_GLIBC = (2, 17)
"""Before it the tags have other names."""
_GLIBC_OF = {19: (2, 17), 22: (2, 24), 25: (2, 28), 28: (2, 31), 29: (2, 34), 30: (2, 35), 33: (2, 39)}
"""The glibc of the oldest distribution whose C++ library has the symbols GLIBCXX_3.4.X, by X."""
_CXX = re.compile(rb"GLIBCXX_3\.4\.(\d+)")


def client_paths(root: Path, names: Iterable[str]) -> set[str]:
    """Return which files of a wheel are the client's: modules, and all of the stubs with their sources."""
    modules = {path.relative_to(root).as_posix() for path in modules_of(root, PACKAGE, CLIENT_ROOTS).values()}
    more = (f"{PACKAGE}/py.typed",)
    return {name for name in names if name in modules or name.startswith(_STUBS) or name in more}


def divided(whole: Wheel, of_client: Collection[str]) -> tuple[Wheel, Wheel]:
    """Return the client's wheel, and one of the rest, which needs it in the same version."""
    metadata = copy.deepcopy(whole.metadata)
    metadata["Requires-Dist"] = f"{CLIENT}=={metadata['Version']}"
    licences = {name: data for name, data in whole.own_files.items() if name.startswith("licenses/")}
    files, others = dict[str, bytes](), dict[str, bytes]()
    for name, data in whole.files.items():
        (files if name in of_client else others)[name] = data
    client = Wheel(_client_metadata(whole.metadata), files, licences)
    return client, replace(whole, metadata=metadata, files=others)


def with_kernels(rest: Wheel, levels: Collection[str], tag: str) -> Wheel:
    """Return a wheel with the kernels of these levels only."""
    return replace(rest, tag=tag, files={name: data for name, data in rest.files.items() if _is_of(name, levels)})


def platform_tag(machine: str, libraries: Iterable[bytes], glibc: Iterable[tuple[int, int]]) -> str:
    """Return the tag of a wheel with these libraries, which need these versions of glibc. Raises ``ValueError`` for a
    C++ library that no tag stands for."""
    newest = max((int(each) for library in libraries for each in _CXX.findall(library)), default=0)
    if newest > max(_GLIBC_OF):
        raise ValueError(f"a kernel needs GLIBCXX_3.4.{newest}; no platform tag stands for it: use an older compiler")
    of_cxx = next(version for last, version in _GLIBC_OF.items() if newest <= last)
    major, minor = max([_LEAST_GLIBC, of_cxx, *glibc])
    return f"py3-none-manylinux_{major}_{minor}_{machine}"


def _client_metadata(whole: Message) -> Message:
    metadata = Message()
    metadata["Metadata-Version"], metadata["Name"] = whole["Metadata-Version"], CLIENT
    metadata["Summary"] = "The gRPC client and the stubs of Tokenloom, which serves large language models"
    for name in ("Version", "License-Expression", "License-File", "Requires-Python"):
        if name in whole:
            metadata[name] = whole[name]
    metadata["Provides-Extra"] = "numpy"
    for each in whole.get_all("Requires-Dist", []):
        name = re.split(r"[\s<>=!~;\[(]", each, maxsplit=1)[0].lower()
        if name in CLIENT_NEEDS and "extra ==" not in each:
            metadata["Requires-Dist"] = each
        elif name == "numpy":
            metadata["Requires-Dist"] = f'{each}; extra == "numpy"'
    return metadata


def _is_of(name: str, levels: Collection[str]) -> bool:
    return not name.startswith(_KERNELS) or PurePosixPath(name.removeprefix(_KERNELS)).parts[0] in levels
