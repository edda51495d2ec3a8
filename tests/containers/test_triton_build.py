"""What Triton builds with a C compiler when an engine on a GPU starts, within what its image and its mounts offer."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.test_compose import COMPOSE, ROOT
from tests.k8s.cluster import build, workloads

_STAGES = {
    match[2]: (match[1], match[3])
    for match in re.finditer(
        r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM |\Z)", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
}
"""Stage to the one that it continues, and its commands."""
# Builds what `CudaUtils` of Triton's driver does, of the same file and in the same way; only loading it needs a GPU.
_BUILD = """
import sys
from pathlib import Path
from triton.backends import nvidia
from triton.runtime import build
folder = Path(nvidia.__path__[0])
build._load_module_from_path = lambda name, path: Path(path)
print(build.compile_module_from_src(
    src=(folder / "driver.c").read_text(), name="cuda_utils", library_dirs=[sys.argv[1]],
    include_dirs=[str(folder / "include")], libraries=["libcuda.so.1"],
))
"""


def chain(stage: str) -> list[str]:
    """Return the commands of a stage after those of the stages that it continues."""
    base, commands = _STAGES[stage]
    return [*(chain(base) if base in _STAGES else []), commands]


def environment(stage: str) -> dict[str, str]:
    """Return what the image of a stage sets."""
    lines = [line for commands in chain(stage) for line in re.findall(r"^ENV (.*)$", commands, re.MULTILINE)]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def writable(engine: dict[str, Any]) -> list[str]:
    """Return the folders of a service of compose that can be written, and hold programs."""
    mounts = [each.partition(":") for each in engine["tmpfs"]]
    return [target for target, _, options in mounts if "exec" in options.split(",")]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Provide the image's root, of which only what compose mounts can be written, and its environment."""
    root, variables = tmp_path / "root", environment("engine-cuda")
    programs = root / "programs"
    programs.mkdir(parents=True)
    # With the package g++ come gcc and what they call; an image without it has none of them.
    if any(re.search(r"install .*g\+\+", commands) for commands in chain("engine-cuda")):
        for name in ("gcc", "as", "ld"):
            (programs / name).symlink_to(shutil.which(name) or "")
    for folder in writable(COMPOSE["services"]["engine-gpu"]):
        (root / folder.removeprefix("/")).mkdir(parents=True)
    home = root / variables["HOME"].removeprefix("/")
    home.chmod(0o555)
    (root / "tmp").mkdir()
    moved = {key: f"{root}{value}" if value.startswith("/home/") else value for key, value in variables.items()}
    yield root, moved | {"PATH": str(programs), "TMPDIR": str(root / "tmp")}
    home.chmod(0o755)


def test_the_launcher_of_kernels_is_built_where_the_image_can_be_written(image: tuple[Path, dict[str, str]]) -> None:
    root, variables = image
    stub = root / "libcuda.so.1"  # of the driver, which the container gets from its host
    subprocess.run(["gcc", "-shared", "-o", stub, "-x", "c", "/dev/null"], check=True)
    found = subprocess.run(
        [sys.executable, "-c", _BUILD, str(root)], env=variables, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    built = Path(found.stdout.strip())
    assert built.stat().st_size > 0
    (folder,) = writable(COMPOSE["services"]["engine-gpu"])
    assert built.is_relative_to(f"{root}{folder}")


def test_kubernetes_mounts_a_folder_for_the_kernels_that_is_large_enough() -> None:
    cache = environment("engine-cuda")["TRITON_CACHE_DIR"]
    (engine,) = [each for each in workloads(build("overlays/gpu")) if each.part == "engine"]
    assert engine.container["image"].startswith("tokenloom/engine-cuda")
    assert engine.container["securityContext"]["readOnlyRootFilesystem"] is True
    targets = {each["mountPath"]: each["name"] for each in engine.container["volumeMounts"]}
    (volume,) = [name for path, name in targets.items() if Path(cache).is_relative_to(path)]
    (source,) = [each["emptyDir"] for each in engine.pod["volumes"] if each["name"] == volume]
    assert source == {"sizeLimit": "1Gi"}
