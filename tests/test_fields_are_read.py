"""Every field of a configuration, of a message between processes and of the core's structs is read by the product.

A field counts as read if an expression ``something.field`` reads an attribute of that name. Names that are common to
several classes can hide a field that nothing reads; a name of its own cannot.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenloom.v1 import coordinator_pb2

ROOT = Path(__file__).parent.parent
PRODUCT = [
    path
    for folder in ("engine_core", "gpu_worker", "services", "tokenloom")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]
# Statistics of a step: the metrics read the counters by their names.
READ_BY_NAME = {"SchedulerStats": ROOT / "services/engine/records/engine_metrics.py"}
# Two values of the struct are compared by `__struct_fields__` where a checkpoint is to replace another.
COMPARED = {"ModelPooling": {"text_rules"}}  # test_pooling.py sees such a checkpoint refused
# Columns, which kernels and those who wait for them get in this order.
IN_ORDER = ("SamplingArrays", "EditArrays", "LogprobArrays", "FoundLogprobs")
# Printed whole, as JSON or line by line, by `tokenloom models --template`.
PRINTED = ("TemplateReport",)
# Records that the code of plugins gets; the examples and tests of plugins read them.
FOR_PLUGINS = ("QueuedRequest", "Offers", "PluginRow", "BatchUpdate", "VllmParams")
# Only outside clients read these: they are the text of requests and answers over HTTP, and results of the library.
FOR_CLIENTS = ("services/gateway/", "tokenloom/client/", "tokenloom/offline/", "tokenloom/cli/", "tokenloom/request/")


class Definition(NamedTuple):
    """A struct or dataclass of the product."""

    path: str
    name: str
    fields: tuple[str, ...]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_plain_data(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return bool(bases & {"Struct", "NamedTuple", "ServiceSettings"}) or "dataclass" in decorators


def definitions() -> Iterator[Definition]:
    for path in PRODUCT:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and is_plain_data(node):
                fields = tuple(
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and "ClassVar" not in ast.unparse(statement.annotation)
                )
                yield Definition(str(path.relative_to(ROOT)), node.name, fields)


@cache
def reads() -> set[str]:
    return {
        node.attr
        for path in PRODUCT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def names_in(path: Path) -> set[str]:
    return {
        node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def unread(definition: Definition) -> list[str]:
    by_name = names_in(READ_BY_NAME[definition.name]) if definition.name in READ_BY_NAME else set()
    compared = COMPARED.get(definition.name, set())
    return [field for field in definition.fields if field not in reads() | by_name | compared]


@cache
def structs() -> list[Definition]:
    found = (each for each in definitions() if each.fields and each.name not in IN_ORDER + PRINTED + FOR_PLUGINS)
    return [each for each in found if not each.path.startswith(FOR_CLIENTS)]


def test_every_field_is_read() -> None:
    """One test for all structs, so that the collection of tests need not parse the product."""
    unread_by_struct = {f"{struct.path}:{struct.name}": unread(struct) for struct in structs()}
    assert not {name: fields for name, fields in unread_by_struct.items() if fields}


def test_the_walk_sees_the_structs_of_every_process() -> None:
    names = {struct.name for struct in structs()}
    assert {"EngineConfig", "CacheConfig", "EngineSettings", "CoreReady", "WorkerInit", "SchedulerOutput"} <= names
    assert {"ModelInfo", "KVCacheConfig", "EngineCoreRequest", "MeshOptions", "ModelConfig"} <= names


def test_a_field_that_nothing_reads_is_found() -> None:
    """An option that is only passed on as a flag, and named in a table of options, is not read."""
    assert unread(Definition("engine_core/data/config.py", "CacheConfig", ("engines_per_host",))) == [
        "engines_per_host"
    ]


def test_every_field_of_the_coordinator_s_messages_is_read() -> None:
    for name, message in coordinator_pb2.DESCRIPTOR.message_types_by_name.items():
        dead = [field.name for field in message.fields if field.name not in reads() and not is_named(field.name)]
        assert not dead, f"{name} has fields that nothing reads"


def is_named(field: str) -> bool:
    """Return whether code asks for the field by its name, as ``HasField`` does."""
    return any(field in names_in(path) for path in PRODUCT if "_pb2" not in path.name)
