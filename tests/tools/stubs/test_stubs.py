"""What `make stubs` writes without Go and npm; `make clients` compiles and uses the stubs."""

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tools.stubs import npm_stubs
from tools.stubs.protoc import PROTOS, PUBLIC, StubsFailed, generate

# A first line of a script cannot name an interpreter in a folder with a blank.
PLUGIN = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -c '
import sys
from google.protobuf.compiler import plugin_pb2
asked = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
answer = plugin_pb2.CodeGeneratorResponse(supported_features=1)  # optional fields
for name in asked.file_to_generate:
    answer.file.add(name=name + ".txt", content=asked.parameter)
sys.stdout.buffer.write(answer.SerializeToString())
'
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_public_protos_are_those_that_buf_generates() -> None:
    (inputs,) = yaml.safe_load((PROTOS / "buf.gen.yaml").read_text())["inputs"]
    assert [*PUBLIC] == inputs["paths"]


def test_the_public_protos_need_no_other_ones_of_ours() -> None:
    lines = [line for proto in PUBLIC for line in (PROTOS / proto).read_text().splitlines()]
    imported = {line.split('"')[1] for line in lines if line.startswith("import ")}
    assert {name for name in imported if name.startswith("tokenloom/")} <= {*PUBLIC}


def test_a_plugin_gets_every_public_proto_and_each_option(tmp_path: Path) -> None:
    plugin = program(tmp_path / "plugin", PLUGIN)
    generate([("some", plugin)], ["one=1", "two=2"], tmp_path / "out")
    for proto in PUBLIC:
        assert (tmp_path / "out" / f"{proto}.txt").read_text() == "one=1,two=2"


def test_what_a_plugin_says_is_shown(tmp_path: Path) -> None:
    plugin = program(tmp_path / "plugin", "#!/bin/sh\necho 'no such option' >&2\nexit 3\n")
    with pytest.raises(StubsFailed, match="no such option"):
        generate([("some", plugin)], [], tmp_path / "out")


def test_the_package_exports_each_public_proto() -> None:
    package = npm_stubs.package()
    assert package["name"] == "tokenloom-client"
    exports = package["exports"]
    assert isinstance(exports, dict)
    assert exports["./inference"]["default"] == "./dist/tokenloom/v1/inference.js"
    assert len(exports) == len(PUBLIC)


def test_what_npm_did_not_install_as_a_whole_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, calls = tmp_path / "fails", tmp_path / "calls"
    fails.touch()
    npm = f"#!/bin/sh\necho >> {calls}\nmkdir -p node_modules/half\ntest ! -e {fails}\n"
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "npm", npm)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(npm_stubs, "FOLDER", tmp_path)
    with pytest.raises(StubsFailed, match="status 1"):
        npm_stubs._install("{}")
    fails.unlink()
    for described, count in (("{}", 2), ("{}", 2), ('{"version": 2}', 3)):
        npm_stubs._install(described)
        assert len(calls.read_text().splitlines()) == count
        assert (tmp_path / "package.json").read_text() == described
