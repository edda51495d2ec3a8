"""Base images by digest."""

from pathlib import Path

import pytest

from tools.images import FILES, ROOT, images, main, pinned, unpinned

OLD, NEW = f"sha256:{'0' * 64}", f"sha256:{'a' * 64}"
DOCKERFILE = f"ARG BASE=python:3.11-slim@{OLD}\nFROM ${{BASE}} AS runtime\nCOPY --from=runtime /a /b\n"
COMPOSE = "services:\n  a:\n    image: prom/prometheus:v3\n  b:\n    image: tokenloom/service\n"
NOT_KNOWN = ["jaegertracing/jaeger:2.10.0"]
"""No digest of theirs could be read or was found in more than one place; `make pin-images` writes them."""


def test_images_of_others_are_found() -> None:
    assert list(images(DOCKERFILE)) == [f"python:3.11-slim@{OLD}"]
    assert list(images(COMPOSE)) == ["prom/prometheus:v3"]
    assert unpinned(DOCKERFILE) == []
    assert unpinned(COMPOSE) == ["prom/prometheus:v3"]
    assert unpinned("    image: x:1@sha256:abc\n") == ["x:1@sha256:abc"]  # no digest has three digits


def test_pinning_keeps_the_tag_and_replaces_an_older_digest() -> None:
    asked: list[str] = []

    def resolve(tag: str) -> str:
        asked.append(tag)
        return NEW

    assert pinned(DOCKERFILE, resolve) == DOCKERFILE.replace(OLD, NEW)
    assert pinned(COMPOSE, resolve) == COMPOSE.replace("prometheus:v3", f"prometheus:v3@{NEW}")
    assert asked == ["python:3.11-slim", "prom/prometheus:v3"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "docker-compose.yml").write_text(COMPOSE)
    assert main(["check"], tmp_path) == 1
    assert capsys.readouterr().out == "docker-compose.yml: prom/prometheus:v3\n"

    def refused(tag: str) -> str:
        if tag.startswith("prom/"):
            raise SystemExit("no registry")
        return NEW

    with pytest.raises(SystemExit):
        main(["pin"], tmp_path, refused)
    assert (tmp_path / "Dockerfile").read_text() == DOCKERFILE  # all or nothing
    assert main(["pin"], tmp_path, lambda _: NEW) == 0
    assert main(["check"], tmp_path) == 0


def test_our_base_images_are_named_by_digest() -> None:
    found = [image for name in FILES for image in images((ROOT / name).read_text())]
    assert len(found) == 4
    assert [image for name in FILES for image in unpinned((ROOT / name).read_text())] == NOT_KNOWN
