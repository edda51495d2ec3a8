"""``make wheel-check``: installs the client's wheel alone, measures it, imports it, and resolves it for other systems.

A second argument names ``uv``, which resolves requirements for platforms that this machine is not.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.wheel.check_wheel import BUILD, ROOT, newest_wheel

MOST_BYTES = 30e6
PLATFORMS = ("windows", "aarch64-apple-darwin", "x86_64-manylinux_2_28")
ENGINE_PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
"""Engines need llguidance, whose wheels need this glibc."""
NEEDED = {
    "tokenloom-client": PLATFORMS,
    "tokenloom": PLATFORMS,
    "tokenloom[engine,encoder,transformers,mcp,ray]": ENGINE_PLATFORMS,
}
"""What users install, with the platforms for which it must resolve."""
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
_PROGRAM = """
import tokenloom.client
import tokenloom.v1.inference_pb2_grpc
try:
    from tokenloom import LLM
except ImportError as error:
    print(error)
"""


def main(uv: str) -> int:
    wheels = (
        newest_wheel(ROOT / "dist", "tokenloom_client-*-any.whl"),
        newest_wheel(ROOT / "dist", "tokenloom-*-any.whl"),
    )
    folder = BUILD / "client"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile")
    subprocess.run([*pip, str(wheels[0])], check=True)
    size = sum(path.stat().st_size for path in folder.joinpath("lib").rglob("*") if path.is_file())
    print(f"the client alone takes {size / 1e6:.1f} MB of at most {MOST_BYTES / 1e6:.0f}")
    said = subprocess.run([python, "-I", "-c", _PROGRAM], check=True, capture_output=True, text=True).stdout
    assert "only tokenloom-client is installed" in said, said
    resolved = list(_resolved(uv, wheels[0].parent))
    return 0 if size <= MOST_BYTES and all(resolved) else 1


def _resolved(uv: str, wheels: Path) -> Iterator[bool]:
    """Yield for each requirement, platform and version of Python whether a set of wheels can be installed."""
    for name, platforms in NEEDED.items():
        for platform in platforms:
            for version in VERSIONS:
                command = (uv, "pip", "compile", "--quiet", "--python-platform", platform, "--python-version", version)
                done = subprocess.run(
                    [*command, "--only-binary", ":all:", "--find-links", str(wheels), "--no-header", "-"],
                    input=name,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                print(f"{name} for {platform}, Python {version}: {'resolves' if not done.returncode else done.stderr}")
                yield done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
