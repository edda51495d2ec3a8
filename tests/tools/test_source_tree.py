"""Which files count, and under which names."""

from pathlib import Path

from tools.figures.source_tree import SourceTree, module_name


def _write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f'"""{path}"""\n')


def test_a_linked_folder_counts_once_under_its_real_name(tmp_path: Path) -> None:
    _write(tmp_path, "tokenloom/__init__.py", "services/gateway/http/app.py")
    (tmp_path / "tokenloom" / "services").symlink_to("../services")
    assert [source.path for source in SourceTree(tmp_path).product] == [
        "tokenloom/__init__.py",
        "services/gateway/http/app.py",
    ]


def test_generated_stubs_tests_and_benchmarks_are_not_the_product(tmp_path: Path) -> None:
    _write(tmp_path, "engine_core/core.py", "engine_core/x_pb2.py", "engine_core/x_pb2_grpc.py", "engine_core/note.txt")
    _write(tmp_path, "tests/engine_core/test_core.py", "benchmarks/mesh.py", "protos/tokenloom/v1/types.proto")
    tree = SourceTree(tmp_path)
    assert [source.path for source in tree.product] == ["engine_core/core.py"]
    assert [source.path for source in tree.package] == ["engine_core/core.py", "benchmarks/mesh.py"]
    assert set(tree.aside) == {"tests", "benchmarks"}
    assert [source.path for source in tree.contracts] == ["protos/tokenloom/v1/types.proto"]


def test_a_file_is_imported_under_the_package() -> None:
    assert module_name("tokenloom/llm.py") == "tokenloom.llm"
    assert module_name("services/gateway/http/app.py") == "tokenloom.services.gateway.http.app"
    assert module_name("engine_core/__init__.py") == "tokenloom.engine_core"
    assert module_name("benchmarks/mesh.py") == "tokenloom.bench.mesh"
    assert module_name("tests/conftest.py") is None
