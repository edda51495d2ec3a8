"""Cycles, single importers and shared names."""

from tools.figures.imports import cycles, import_graph, study
from tools.figures.source_tree import Source


def test_every_form_of_import_is_an_edge() -> None:
    sources = [
        Source("engine_core/__init__.py", ""),
        Source("engine_core/a.py", "from . import b\nfrom .c import x\nimport json\n"),
        Source("engine_core/b.py", "from tokenloom.services.runtime.errors import E\n"),
        Source("engine_core/c.py", "if TYPE_CHECKING:\n    import tokenloom.engine_core.b\n"),
        Source("services/runtime/errors.py", "def f():\n    from ...engine_core import name\n"),
    ]
    assert import_graph(sources) == {
        "engine_core/__init__.py": set(),
        "engine_core/a.py": {"engine_core/b.py", "engine_core/c.py"},
        "engine_core/b.py": {"services/runtime/errors.py"},
        "engine_core/c.py": {"engine_core/b.py"},
        "services/runtime/errors.py": {"engine_core/__init__.py"},
    }


def test_a_package_imports_relative_to_itself() -> None:
    sources = [Source("services/gateway/__init__.py", "from .app import App\n"), Source("services/gateway/app.py", "")]
    assert import_graph(sources)["services/gateway/__init__.py"] == {"services/gateway/app.py"}


def test_each_cycle_is_found_whole() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(graph) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_single_importers_and_shared_names() -> None:
    sources = [
        Source("engine_core/__init__.py", ""),
        Source("engine_core/registry.py", ""),
        Source("services/__init__.py", ""),
        Source("services/registry.py", "from tokenloom.engine_core import registry, words\n"),
        Source("engine_core/words.py", "from . import registry\n"),
    ]
    found = study(sources)
    assert found.single_importer == ["engine_core/words.py"]
    assert found.shared_names == {"registry.py": ["engine_core", "services"]}
    assert found.cycles == []
