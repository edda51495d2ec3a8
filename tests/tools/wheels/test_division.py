"""The wheels of a release: what is in which, what they need, and their tags."""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tools.wheels.division import client_paths, divided, platform_tag, with_kernels
from tools.wheels.wheel_file import Wheel

ROOT = Path(__file__).parents[3]
KERNELS = "tokenloom/gpu_worker/kernels/prebuilt"
FILES = {
    "tokenloom/__init__.py": b"",
    "tokenloom/client/__init__.py": b"",
    "tokenloom/v1/inference.proto": b"",
    "tokenloom/cli/main.py": b"",
    f"{KERNELS}/x86-64-v3/fused-1.so": b"3",
    f"{KERNELS}/x86-64-v4/fused-1.so": b"4",
    f"{KERNELS}/aarch64/fused-1.so": b"a",
}
HEADS = (
    *(("Metadata-Version", "2.4"), ("Name", "tokenloom"), ("Version", "1.2"), ("Requires-Python", ">=3.11")),
    *(("Requires-Dist", each) for each in ("grpcio>=1.80", "numpy>=1.26", 'torch>=2; extra == "engine"')),
    *(
        ("Provides-Extra", "engine"),
        ("Requires-Dist", 'msgspec>=9; extra == "engine"'),
        ("Requires-Dist", "msgspec>=0.19"),
    ),
)


def whole() -> Wheel:
    metadata = Message()
    for name, value in HEADS:
        metadata[name] = value
    metadata.set_payload("Serves é — models.\n")
    return Wheel(metadata, dict(FILES), {"licenses/LICENSE": b"free", "entry_points.txt": b"[console_scripts]"})


def of(wheel: Wheel, name: str) -> list[str]:
    return list(wheel.metadata.get_all(name, []))


def test_no_path_is_in_both_and_the_rest_needs_the_client() -> None:
    client, rest = divided(whole(), client_paths(ROOT, FILES))
    assert client.files.keys() == {
        "tokenloom/__init__.py",
        "tokenloom/client/__init__.py",
        "tokenloom/v1/inference.proto",
    }
    assert rest.files.keys() == FILES.keys() - client.files.keys()
    assert of(client, "Requires-Dist") == ["grpcio>=1.80", 'numpy>=1.26; extra == "numpy"', "msgspec>=0.19"]
    assert of(rest, "Requires-Dist") == [*of(whole(), "Requires-Dist"), "tokenloom-client==1.2"]
    assert (of(client, "Name"), of(client, "Version")) == (["tokenloom-client"], ["1.2"])
    assert (client.own_files.keys(), rest.own_files.keys()) == ({"licenses/LICENSE"}, whole().own_files.keys())


def test_the_client_has_all_that_it_imports_and_neither_numpy_nor_a_service() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tokenloom").rglob("*.py")]
    names += [path.relative_to(ROOT).as_posix() for path in (ROOT / "tokenloom" / "services").rglob("*.py")]
    found = client_paths(ROOT, names)
    assert "tokenloom/request/errors.py" in found
    assert not [name for name in found if name.startswith(("tokenloom/cli/", "tokenloom/bench/"))]
    assert not [name for name in found if "services/" in name]
    code = "import sys; sys.modules['numpy'] = None; import tokenloom.client; "
    code += "sys.exit(' '.join({'uvloop', 'tokenizers', 'rich', 'typer', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "")


def test_a_wheel_holds_the_kernels_of_its_machine_only() -> None:
    wheel = with_kernels(whole(), ["x86-64-v3", "x86-64-v4"], "py3-none-manylinux_2_28_x86_64")
    assert wheel.files.keys() == FILES.keys() - {f"{KERNELS}/aarch64/fused-1.so"}
    assert not [name for name in with_kernels(whole(), (), "py3-none-any").files if name.endswith(".so")]


@pytest.mark.parametrize(
    ("library", "glibc", "tag"),
    [
        (b"", (0, 0), "manylinux_2_17"),
        (b"GLIBCXX_3.4.9 GLIBCXX_3.4", (2, 9), "manylinux_2_17"),
        (b"", (2, 27), "manylinux_2_27"),
        (b"GLIBCXX_3.4.22", (2, 2), "manylinux_2_24"),
        (b"GLIBCXX_3.4.29 GLIBCXX_3.4.30", (2, 28), "manylinux_2_35"),
    ],
)
def test_a_tag_names_the_oldest_system_that_has_what_the_kernels_need(
    library: bytes, glibc: tuple[int, int], tag: str
) -> None:
    assert platform_tag("x86_64", [b"", library], [(2, 4), glibc]) == f"py3-none-{tag}_x86_64"


def test_a_library_that_is_too_new_for_every_tag_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GLIBCXX_3\.4\.99"):
        platform_tag("x86_64", [b"GLIBCXX_3.4.99"], [])


def test_a_wheel_is_written_as_installers_read_it(tmp_path: Path) -> None:
    path = with_kernels(whole(), ["aarch64"], "py3-none-manylinux_2_17_aarch64").write(tmp_path)
    assert path.name == "tokenloom-1.2-py3-none-manylinux_2_17_aarch64.whl"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    own = "tokenloom-1.2.dist-info"
    assert {"Root-Is-Purelib: false", "Tag: py3-none-manylinux_2_17_aarch64"} <= set(
        contents[f"{own}/WHEEL"].decode().splitlines()
    )
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(contents[f"{own}/RECORD"].decode()))}
    assert rows.keys() == contents.keys()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"a").digest()).decode().rstrip("=")
    assert rows[f"{KERNELS}/aarch64/fused-1.so"] == f"sha256={digest}"
    assert contents[f"{own}/METADATA"].decode().endswith("\n\nServes é — models.\n")
    assert Wheel.read(path).files == {name: data for name, data in FILES.items() if "x86" not in name}
