"""Name the images that others publish by digest: ``python tools/images.py check`` or ``pin``.

A tag such as ``v3.5.0`` may point to other content tomorrow; a digest may not. ``pin`` asks the registry which digest a
tag has now and writes it behind the tag; ``check`` lists the images that are named by their tag only.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("Dockerfile", "docker-compose.yml")
OURS = "tokenloom/"
"""Images that are built here have no digest before they are pushed."""
_REFERENCE = re.compile(r"^(\s*image: |ARG BASE=)(\S+)$", re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Resolve = Callable[[str], str]
"""Returns the digest of a tag."""


def images(text: str) -> Iterator[str]:
    """Yield the references to images that others publish, as the file has them."""
    return (match[2] for match in _REFERENCE.finditer(text) if not match[2].startswith(OURS))


def unpinned(text: str) -> list[str]:
    """Return the references without a digest."""
    return [image for image in images(text) if not _DIGEST.fullmatch(image.partition("@")[2])]


def pinned(text: str, resolve: Resolve) -> str:
    """Return the text with the digest that each tag has now."""

    def replaced(match: re.Match[str]) -> str:
        if match[2].startswith(OURS):
            return match[0]
        tag = match[2].partition("@")[0]
        return f"{match[1]}{tag}@{resolve(tag)}"

    return _REFERENCE.sub(replaced, text)


def digest_of(tag: str) -> str:
    """Ask the registry. Raises ``SystemExit`` if docker is missing or the registry does not answer."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", tag]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
    except FileNotFoundError:
        raise SystemExit("docker is needed to ask a registry for digests") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{tag}: {error.stderr.strip()}") from None
    if not _DIGEST.fullmatch(found):
        raise SystemExit(f"{tag}: the registry returned {found!r:.80}, which is no digest")
    return found


def main(argv: Sequence[str] | None = None, root: Path = ROOT, resolve: Resolve = digest_of) -> int:
    """Return 1 if ``check`` found an image without a digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("check", "pin"))
    action = parser.parse_args(argv).action
    paths = [root / name for name in FILES]
    if action == "pin":
        texts = [pinned(path.read_text(), resolve) for path in paths]  # all, before the first file changes
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return 0
    missing = [f"{path.name}: {image}" for path in paths for image in unpinned(path.read_text())]
    sys.stdout.write("\n".join(missing or ["Every image is named by its digest."]) + "\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
