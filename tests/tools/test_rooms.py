"""Circles of folders, shared class names, comments and wide constructors."""

import ast

from tools.figures.rooms import folder_graph, study_rooms
from tools.figures.source_tree import Source

WIDE = "class Wide:\n    def __init__(self, a, b, c, d, *, e, f, g, h, **i):\n        pass\n"


def test_a_folder_depends_on_what_its_own_files_import() -> None:
    sources = [
        Source("engine_core/core.py", "from .process.pulse import Pulse\n"),
        Source("engine_core/config.py", ""),
        Source("engine_core/process/pulse.py", "def f():\n    from ..config import Config\n"),
        Source("services/app.py", "if TYPE_CHECKING:\n    from tokenloom.engine_core.core import Core\n"),
    ]
    assert folder_graph(sources) == {
        "engine_core": {"engine_core/process"},
        "engine_core/process": {"engine_core"},
        "services": {"engine_core"},
    }
    assert study_rooms(sources).circles == [["engine_core", "engine_core/process"]]


def test_only_public_classes_of_several_files_share_a_name() -> None:
    sources = [
        Source("services/a.py", "class Reply:\n    class Inner:\n        pass\nclass _Kept:\n    pass\n"),
        Source("services/b.py", "class Reply:\n    class Inner:\n        pass\nclass _Kept:\n    pass\n"),
        Source("services/c.py", "class Other:\n    pass\nclass Other:\n    pass\n"),
    ]
    shared = study_rooms(sources).shared_classes
    assert shared.pop("Other") == ["services/c.py", "services/c.py"]
    assert shared == {"Reply": ["services/a.py", "services/b.py"]}


def test_lines_of_code_and_comment() -> None:
    text = '"""A module."""\n\n# Why.\nx = 1  # what\n"""Of x."""\n\ndef f() -> str:\n    # Why.\n    return "# no"\n'
    rooms = study_rooms([Source("services/a.py", text)])
    assert (rooms.code_lines, rooms.comment_lines) == (3, 2)
    assert rooms.statements == sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def test_constructors_of_more_than_eight_parameters() -> None:
    rooms = study_rooms([Source("services/a.py", WIDE), Source("services/b.py", WIDE.replace(", **i", ""))])
    assert rooms.wide_constructors == {"services/a.py:Wide": 9}
