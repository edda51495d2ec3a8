"""Files that know a parameter."""

from pathlib import Path

from tools.figures.parameters import find_parameters
from tools.figures.source_tree import SourceTree


def test_only_whole_words_in_the_product_and_its_contracts_count(tmp_path: Path) -> None:
    files = {
        "engine_core/params.py": "min_p: float = 0.0\n",
        "engine_core/other.py": "min_probability = min_ps = 1\n",
        "engine_core/params_pb2.py": "min_p\n",
        "tests/test_params.py": "min_p\n",
        "protos/tokenloom/v1/types.proto": "float min_p = 1;\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    [found] = find_parameters(SourceTree(tmp_path), ["min_p"])
    assert found.python == ["engine_core/params.py"]
    assert found.contracts == ["protos/tokenloom/v1/types.proto"]
