"""What ``serve`` prints when every part serves."""

import asyncio
from dataclasses import dataclass, field

import pytest

from tests.clients.run import served_url
from tokenloom.cli.serve import serving
from tokenloom.supervisor.state_dir import PartReport


@dataclass
class FakeMesh:
    """Stands in for a mesh that serves at once."""

    lengths: tuple[int | None, ...] = (512,) * 4
    """The contexts of the engines."""
    events: list[str] = field(default_factory=list)
    degraded: bool = False

    async def wait_serving(self) -> None:
        self.events.append("serving")

    async def output_settled(self) -> None:
        self.events.append("settled")

    def fall_backs(self, service: str) -> list[str]:
        return [f"{service}: less"] if self.degraded else []

    async def wait_failed(self) -> None:
        self.events.append("waits")

    @property
    def gateways(self) -> list[PartReport]:
        return self.states("gateway")

    def states(self, service: str) -> list[PartReport]:
        if service == "engine":
            return [PartReport(1, "e", None, None, "", max_model_len=length) for length in self.lengths]
        return [PartReport(1, "127.0.0.1:9123", None, "127.0.0.1:8123", "")]


@pytest.mark.parametrize(
    ("lengths", "context"),
    [((2048, 4096), ", context: 2048 tokens"), ((None, 4096), ", context: 4096 tokens"), ((None, None), "")],
)
def test_the_last_line_says_where_and_what_is_served(
    lengths: tuple[int | None, ...], context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = FakeMesh(lengths)
    asyncio.run(serving._announce_and_wait(mesh, ["demo"], "http"))  # type: ignore[arg-type]
    assert mesh.events == ["serving", "settled", "waits"]
    line = capsys.readouterr().out
    assert line == (
        f"demo is served at http://127.0.0.1:8123 (page: http://127.0.0.1:8123/, gRPC: 127.0.0.1:9123{context}). "
        "Ctrl-C stops it.\n"
    )
    assert served_url(line) == "http://127.0.0.1:8123", "`make clients` reads the line"
    assert served_url("") == ""


def test_with_several_models_each_one_s_context_is_that_of_its_engines(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = FakeMesh((8192, 4096, 512, 512))
    asyncio.run(serving._announce_and_wait(mesh, ["large", "small"], "http"))  # type: ignore[arg-type]
    line = capsys.readouterr().out
    assert line.startswith("large and small are served at http://127.0.0.1:8123 (page: ")
    assert "context: 4096 and 512 tokens" in line


def test_the_line_says_what_the_engines_do_without(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(serving._announce_and_wait(FakeMesh(degraded=True), ["demo"], "http"))  # type: ignore[arg-type]
    line = capsys.readouterr().out
    assert line.endswith("context: 512 tokens). Fall-back of engines: engine: less. Ctrl-C stops it.\n")
