"""Checks this machine before a start: open files, directories, certificates, addresses, platform and packages."""

import os
import platform
import re
import resource
import socket
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tokenloom.process import unix_socket
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.addresses import MAX_UNIX_PATH, Address, parse
from tokenloom.services.runtime.host import limits

from .small_files import CannotServe

_OWN = 32
_FOR_EACH_PART = 4
"""Files that the supervisor has open, by itself and for each part: its output, its process and its health."""


def check_open_files(num_parts: int) -> None:
    """Raise `CannotServe` if the limit of open files is too low for a part, or for the supervisor of so many parts.

    Each process raises its soft limit to the hard one, which therefore decides for a part.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limits.check_limit(hard)
        limits.check_limit(soft, _OWN + _FOR_EACH_PART * num_parts)
    except FailedPrecondition as error:
        raise CannotServe(error.message) from None


_LONGEST_NAME = "mesh-12345678/output_processor-63-kv.sock.calls"
_NEEDED_BYTES = 16 << 20


def check_run_directory(path: Path) -> None:
    """Raise `CannotServe` if sockets in a directory under ``path`` would have too long names, or its disk is full."""
    longest = len(os.fsencode(path / _LONGEST_NAME))
    if longest > MAX_UNIX_PATH:
        raise CannotServe(
            f"{path} is too long for unix sockets, whose paths have at most {MAX_UNIX_PATH} bytes, by "
            f"{longest - MAX_UNIX_PATH}: set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
        )
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if free < _NEEDED_BYTES:
        raise CannotServe(
            f"{path} has {free / 1e6:.0f} MB left, and a mesh needs {_NEEDED_BYTES / 1e6:.0f} MB there: free space, or "
            "set XDG_RUNTIME_DIR or TMPDIR to another directory"
        )


def check_files(files: Mapping[str, Path]) -> None:
    """Check that each file can be read; keys are the flags that name them. Raises `CannotServe`."""
    for flag, path in files.items():
        try:
            open(os.path.expanduser(path), "rb").close()
        except OSError as error:
            raise CannotServe(
                f"{flag}: {path} cannot be read ({error.strerror}): give the path of an existing file"
            ) from None


def check_directories(directories: Mapping[str, Path]) -> None:
    """Check that each directory can be written, or made; keys are the flags that name them. Raises `CannotServe`."""
    for flag, path in directories.items():
        nearest = next((each for each in (path, *path.absolute().parents) if os.path.exists(each)), path)
        if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
            raise CannotServe(
                f"{flag}: {path} cannot be used, because {nearest} is no directory that this user can write"
            )


def check_certificate(certificate: Path, key: Path) -> None:
    """Check that a certificate and its private key are PEM files that belong together. Raises `CannotServe`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise CannotServe(
            f"{certificate} and {key} are not a certificate and its key in PEM ({reason}): `tokenloom certs` makes "
            "such files"
        ) from None


_ANY = frozenset({"0.0.0.0", "::", ""})
"""Hosts that stand for all addresses of the machine."""


def check_addresses(
    wanted: Mapping[str, Iterable[str]], counts: Mapping[str, int], held: Iterable[tuple[Address, str]] = ()
) -> None:
    """Check the addresses that the parts are given by flags.

    Args:
        wanted: The flags of each service, such as ``--metrics-listen=127.0.0.1:9100``.
        counts: How many parts of each service there will be.
        held: The addresses at which clients connect, each with the options that name it; they are held already.

    Raises `CannotServe`.
    """
    taken: list[tuple[Address, str]] = []
    for address, owner in held:
        for other, another in taken:
            if owner != another and _overlap(address, other):
                raise CannotServe(f"{owner} and {another} name one port ({address}): choose another for one of them")
        taken.append((address, owner))
    for service, flags in wanted.items():
        for name, value in _listened(flags):
            where = f"{service}: {name} {value}"
            address = _address(where, value)
            if counts.get(service, 1) > 1:
                raise CannotServe(
                    f"{where}: {counts[service]} parts cannot listen on one port: use port 0, which is free for each"
                )
            for other, owner in taken:
                if _overlap(address, other):
                    raise CannotServe(f"{where}: {owner} has the same port: choose another port for one of them")
            taken.append((address, service))
            _try(where, address)


def _overlap(one: Address, other: Address) -> bool:
    """Return whether two sockets that listen exclude each other: on one port, at one host or at all of them."""
    if one.path or other.path:
        return one.path == other.path
    if one.port != other.port:
        return False
    return not _ANY.isdisjoint((one.host, other.host)) or not _numbers(one.host).isdisjoint(_numbers(other.host))


def _numbers(host: str) -> frozenset[str]:
    """Return the IP addresses of a host, of ``localhost`` those of the machine itself; the host if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # `_try` says what is wrong with it
        return frozenset((host,))
    return frozenset(str(address[0]) for *_, address in found)


def _listened(flags: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the flags that name an address with a fixed port."""
    for each in flags:
        name, _, value = each.partition("=")
        if name.endswith("-listen") and value and not value.endswith(":0"):
            yield name, value


def _address(where: str, value: str) -> Address:
    try:
        return parse(value)
    except InvalidArgument as error:
        raise CannotServe(f"{where}: {error.message}") from None


def _try(where: str, address: Address) -> None:
    if address.path:
        if unix_socket.is_served(address.path):
            raise CannotServe(f"{where}: a process listens there: choose another path")
        return
    probe = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except (OSError, OverflowError, UnicodeError, TypeError) as error:  # the last two: no name of a host
            raise CannotServe(
                f"{where}: {getattr(error, 'strerror', None) or error}: choose another address or port"
            ) from None


TESTED = "Linux on x86-64"
ALSO_BUILT = "Linux on aarch64"


def platform_note() -> str:
    """Return one sentence for a user of another platform; empty: the platform is a tested one."""
    machine = platform.machine()
    if sys.platform == "linux" and machine == "x86_64":
        return ""
    if sys.platform == "linux" and machine == "aarch64":
        return f"{ALSO_BUILT} has built kernels but is not tested: please compare answers with {TESTED}."
    return (
        f"{platform.system()} on {machine} is not a tested platform ({TESTED} is): parts may fail to start; use the "
        "container images instead."
    )


_INSTALL = "pip install 'tokenloom[engine]'"
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
_NEEDED = ("torch", "safetensors", "llguidance")
_FOR_ENCODERS = {"av": "av", "pillow": "PIL", "transformers": "transformers"}


def check_engine_packages() -> None:
    """Raise `CannotServe` unless this environment has the packages with which an engine computes a model."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CannotServe(
            f"The engine needs {', '.join(missing)}, which this environment lacks: run {_INSTALL} (on a machine "
            f"without a GPU with {_CPU_INDEX})"
        )
    if reason := untested_torch():
        raise CannotServe(f"{reason}: run {_INSTALL}")


def check_encoder_packages() -> None:
    """Raise `CannotServe` unless this environment has the packages with which an encoder reads images and sounds."""
    missing = [name for name, module in _FOR_ENCODERS.items() if find_spec(module) is None]
    if missing:
        raise CannotServe(
            f"The model reads images or sounds, and its encoder needs {', '.join(missing)}, which this environment "
            "lacks: run pip install 'tokenloom[encoder]', or serve its text alone with --language-model-only"
        )


def untested_torch() -> str:
    """Return why the installed torch is not one that this release was tested with; empty: it is."""
    bounds, installed = dict(_bounds("torch")), metadata.version("torch")
    version = _version_numbers(installed)
    lowest, highest = bounds.get(">="), bounds.get("<")
    if lowest is not None and version < _version_numbers(lowest):
        return f"torch {installed} is older than {lowest}, the oldest version that is supported"
    if highest is not None and version >= _version_numbers(highest):
        return f"torch {installed} is newer than the versions that this release was tested with (below {highest})"
    return ""


def _bounds(package: str) -> Iterator[tuple[str, str]]:
    """Yield the bounds of the requirement for a package, such as ``(">=", "2.11")``."""
    try:
        requirements = metadata.requires("tokenloom") or []
    except metadata.PackageNotFoundError:  # run from a clone that is not installed
        return
    for requirement in requirements:
        specifiers = requirement.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", specifiers)
        if name is not None and name[0] == package:
            yield from re.findall(r"(>=|<)\s*([\d.]+)", specifiers)


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
