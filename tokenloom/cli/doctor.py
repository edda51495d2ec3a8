"""``tokenloom doctor``: examines this machine and says what keeps a mesh from starting, or makes it slow."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from tokenloom.preflight.findings import Finding, examine_certificates, examine_engine, examine_host, examine_plugins
from tokenloom.supervisor.ports import PortTaken, reserved_ports
from tokenloom.supervisor.state_dir import StateDirError, read_part_state, root, running_meshes

from .failures import FAILED
from .tables import output_width

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    host: Annotated[str, typer.Option(help="Address on which a gateway would listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port that it would have.")] = 8000,
    certs: Annotated[Path, typer.Option(help="Folder with the certificates of a mesh.")] = Path("certs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of lines.")] = False,
) -> None:
    """Examine packages, kernels, memory, ports, certificates and the clock; exits with 1 if something fails."""
    findings = list(_findings(host, port, certs))
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        width = output_width()
        for each in findings:
            level = f"{each.level:<4}"
            text = _wrapped(f"{level}  {each.subject:<13}  ", each.text, width)
            typer.echo(typer.style(level, fg=_COLOURS[each.level]) + text.removeprefix(level))
    raise typer.Exit(FAILED if any(each.level == "fail" for each in findings) else 0)


def _wrapped(head: str, text: str, width: int) -> str:
    """Return the text behind its head, in lines that begin below each other and are cut between words only."""
    further = " " * len(head)
    return fill(
        text,
        max(width, 2 * len(head)),
        initial_indent=head,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _findings(host: str, port: int, certs: Path) -> Iterator[Finding]:
    try:
        directory = root()
    except StateDirError as error:
        yield Finding("fail", "sockets", str(error))
    else:
        yield from examine_host(directory, os.environ.get("CUDA_VISIBLE_DEVICES"))
        yield _ports(host, port)
        yield from _fall_backs()
    yield from examine_engine()
    yield from examine_certificates(certs)
    yield from examine_plugins()


def _fall_backs() -> Iterator[Finding]:
    """Yield what the parts of this user's running meshes do without."""
    for mesh in running_meshes():
        for part in mesh.parts:
            state = read_part_state(Path(part.state_file))
            for each in state.fall_backs if state is not None else ():
                yield Finding("warn", "fall-backs", f"{part.service}-{part.index} on port {mesh.port}: {each}")


def _ports(host: str, port: int) -> Finding:
    try:
        with reserved_ports(host, 1, port, None) as (ports,):
            return Finding("ok", "ports", f"{ports.http} (HTTP) and {ports.grpc} (gRPC) are free")
    except PortTaken as error:
        if any(mesh.port == port for mesh in running_meshes()):
            return Finding("warn", "ports", f"a mesh of yours has port {port}; `tokenloom stop --port {port}` stops it")
        return Finding("fail", "ports", str(error))
