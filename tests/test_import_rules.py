"""Which part may import which, as the architecture's table says; and what no module may do.

Rules are checked over the import statements, lazy and type-checking ones included, and over strings that name a module
of ours, as commands that start a process do.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Import name to folder; of several that fit, the longest.
FOLDERS = {
    "tokenloom": ROOT / "tokenloom",
    **{f"tokenloom.{link.name}": link.resolve() for link in (ROOT / "tokenloom").iterdir() if link.is_symlink()},
}
# What the engine core shares with every entrance: the table of sampling parameters, the rule of block hashes, how
# reasoning is found by its tokens, and how a part of what is limited is held.
SAMPLING_PARAMS = "tokenloom.request.sampling_params"
BLOCK_HASH = "tokenloom.request.prefix_schedule"
REASONING = "tokenloom.request.reasoning"
PREFIX_SCHEDULE = "tokenloom.request.prefix_schedule"
ROUTED_ROWS = "tokenloom.request.routed_rows"
LIMITS = "tokenloom.request.limits"
# The head of a GGUF file, which holds configuration and tokenizer.
GGUF_FILE = "tokenloom.gguf.gguf_file"
# The list of sentence-transformers' modules next to a checkpoint, which say how texts and how vectors are made.
SENTENCE_TEXTS = "tokenloom.model_files.sentence_texts"
# What every process has: its limits, its end with its parent, sockets, a directory to meet in, its fall-backs.
OF_PROCESSES = "tokenloom.process"
# Names, checks and errors of requests and of the model's files, for every entrance.
ABOUT_REQUESTS = (
    "tokenloom.request",
    "tokenloom.model_files",
    "tokenloom.gguf",
)
SERVICES = ("coordinator", "encoder", "engine", "gateway", "output_processor", "relay", "tokenizer")

# What worker code may take from the engine core: its plain data and protocols, none of its machinery.
PLAIN_DATA = {
    "tokenloom.engine_core.data",
    *(
        f"tokenloom.engine_core.{name}"
        for name in ("executor.worker", "kv_cache.pool_memory", "kv_transfer.kv_transport")
    ),
    "tokenloom.engine_core.wire.frames",
}

_MODULE_NAME = re.compile(r"tokenloom(\.[a-z_][a-z0-9_]*)+")

EXTRA_LIBRARIES = {
    "tokenloom.engine_core.structured_output.llguidance_backend": {"llguidance"},
    "tokenloom.engine_core.structured_output.xgrammar_backend": {"xgrammar"},
    "tokenloom.engine_core.executor.ray_cluster": {"ray"},
    "tokenloom.engine_core.executor.ray_executor": {"ray"},
}


@dataclass(frozen=True)
class Module:
    """One source file under its import name."""

    name: str
    path: Path
    is_package: bool

    def tree(self) -> ast.Module:
        return _parse(self.path)

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield the absolute names of imported modules, with lines; ``from x import y`` gives both x and x.y."""
        for node in ast.walk(self.tree()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _MODULE_NAME.fullmatch(node.value) and _is_module(node.value):
                    yield node.value, node.lineno
            elif isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield base, node.lineno
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parents = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parents, *([node.module] if node.module else [])])


@cache
def _is_module(name: str) -> bool:
    """Return whether a dotted name, which may as well be a metric or a gRPC service, is that of a module of ours."""
    path = (ROOT / name.replace(".", "/")).resolve()
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules_of(package: str) -> list[Module]:
    """All modules under an import name."""
    prefix = max((name for name in FOLDERS if package == name or package.startswith(name + ".")), key=len)
    folder = FOLDERS[prefix].joinpath(*package.removeprefix(prefix).strip(".").split("."))
    if folder.with_suffix(".py").is_file():
        return [Module(package, folder.with_suffix(".py"), False)]
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join([package, *(parts[:-1] if is_package else parts)])
        found.append(Module(name, path, is_package))
    return found


OURS = [module for package in FOLDERS for module in modules_of(package) if not module.name.startswith("tokenloom.v1")]


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(
    package: str,
    allowed: Sequence[str] = (),
    *,
    third_party: set[str] | None = None,
    never: Sequence[str] = (),
    modules: Sequence[Module] | None = None,
) -> list[str]:
    """Imports by a package's modules (or by ``modules``, as if they were its) that its row of the table does not allow.

    Args:
        allowed: Packages of ours, beside its own, that it may import.
        third_party: All that it may import of others'; None: anything but ``never``.
        never: What it may not import, whatever else holds.
    """
    found = []
    for module in modules_of(package) if modules is None else modules:
        for name, line in module.imports():
            top = name.partition(".")[0]
            if top == "tokenloom":
                # `from tokenloom.v1 import x` also gives what is above: parents of what is allowed are no import of it.
                wrong = not is_in(name, package, *allowed) and not _is_parent(name, (package, *allowed))
            elif top in sys.stdlib_module_names:
                wrong = is_in(name, *never)
            else:
                wrong = is_in(name, *never) or (third_party is not None and top not in third_party)
            if wrong:
                found.append(f"{module.path.name}:{line} imports {name}")
    return found


def _is_parent(name: str, packages: Sequence[str]) -> bool:
    return any(package.startswith(name + ".") for package in packages)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from ..runtime import errors", 0),
        ("from . import servicer", 0),
        ("from tokenloom.v1 import types_pb2", 0),
        ("import json, zmq", 0),
        ("from ..gateway import sse", 2),
        ("from .. import gateway", 1),
        ("import tokenloom.engine_core.data.request", 1),
        ("from tokenloom.gpu_worker.sampler import x", 2),
        ("def f():\n    import torch.nn", 1),
        ("if TYPE_CHECKING:\n    from torch import Tensor", 2),
        ('COMMAND = (sys.executable, "-m", "tokenloom.services.engine.core.worker_main")', 1),
        ('COMMAND = (sys.executable, "-m", "tokenloom.services.runtime.host.probe")', 0),
        ('METHOD = "tokenloom.gateway.no_such_module"', 0),
    ],
)
def test_the_rule_sees_every_form_of_import(tmp_path: Path, source: str, wrong: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    module = Module("tokenloom.services.tokenizer.module", path, False)
    allowed = ("tokenloom.services.runtime", "tokenloom.v1")
    found = violations("tokenloom.services.tokenizer", allowed, never=("torch",), modules=[module])
    assert len(found) == wrong


def test_the_search_finds_the_modules() -> None:
    names = {module.name: module.path for module in OURS}
    assert names["tokenloom.services.runtime.host.host"] == ROOT / "services" / "runtime" / "host" / "host.py"
    assert names["tokenloom.engine_core.core"] == ROOT / "engine_core" / "core.py"
    assert names["tokenloom.cli"] == ROOT / "tokenloom" / "cli" / "__init__.py"


@pytest.mark.parametrize("module", modules_of("tokenloom.engine_core"), ids=lambda module: module.name)
def test_engine_core(module: Module) -> None:
    never = () if module.name == "tokenloom.engine_core.client.async_core_client" else ("asyncio", "zmq.asyncio")
    libraries = {"msgspec", "zmq", "numpy"} | EXTRA_LIBRARIES.get(module.name, set())
    allowed = [
        SAMPLING_PARAMS,
        BLOCK_HASH,
        PREFIX_SCHEDULE,
        REASONING,
        ROUTED_ROWS,
        LIMITS,
        OF_PROCESSES,
    ]
    if module.name == "tokenloom.engine_core.fake_workers.hash_worker":
        allowed.append(GGUF_FILE)
    if module.name == "tokenloom.engine_core.data.lora":
        allowed += ["tokenloom.request.adapter_names", "tokenloom.request.errors"]
    assert not violations("tokenloom.engine_core", allowed, third_party=libraries, never=never, modules=[module])


def test_gpu_worker() -> None:
    package, allowed = (
        "tokenloom.gpu_worker",
        [*sorted(PLAIN_DATA), SAMPLING_PARAMS, LIMITS, GGUF_FILE, SENTENCE_TEXTS, OF_PROCESSES],
    )
    assert not violations(package, allowed, never=("grpc", "asyncio"))
    # Only the folders for that library's models and towers, which are imported when one is loaded.
    folders = (f"{package}.models.transformers", f"{package}.towers")
    modules = [module for module in modules_of(package) if not is_in(module.name, *folders)]
    assert not violations(package, allowed, never=("transformers",), modules=modules)


@pytest.mark.parametrize("service", SERVICES)
def test_services(service: str) -> None:
    allowed = ["tokenloom.services.runtime", *ABOUT_REQUESTS, OF_PROCESSES, "tokenloom.v1"]
    if service == "engine":
        allowed += ["tokenloom.engine_core", "tokenloom.gpu_worker"]
    if service == "relay":  # it is a client of gateways, and continues answers as ours does
        allowed += ["tokenloom.client"]
    if service == "coordinator":  # how its own C++ is built or found
        allowed.append("tokenloom.gpu_worker.kernels.compiler")
    if service == "encoder":  # its processes alone: the service itself imports none of it
        allowed += ["tokenloom.gpu_worker.towers"]
    assert not violations(f"tokenloom.services.{service}", allowed, never=("torch", "transformers"))


def test_runtime_knows_no_service() -> None:
    allowed = [*ABOUT_REQUESTS, OF_PROCESSES, "tokenloom.v1"]
    assert not violations("tokenloom.services.runtime", allowed, never=("torch", "transformers"))


def test_what_is_about_requests_knows_no_server() -> None:
    """The client and the offline API use it too."""
    third_party = {"google", "grpc", "msgspec", "numpy", "huggingface_hub", "tokenizers"}
    allowed = [*ABOUT_REQUESTS, "tokenloom.v1", OF_PROCESSES, "tokenloom.demo_model", "tokenloom.demo_adapters"]
    for package in ABOUT_REQUESTS:
        assert not violations(package, allowed, third_party=third_party)


@pytest.mark.parametrize("module", [LIMITS, OF_PROCESSES])
def test_what_every_process_uses_imports_no_code_of_ours(module: str) -> None:
    """The engine core, its workers and every service hold them."""
    assert not violations(module, third_party=set())


def test_contracts_import_no_code_of_ours() -> None:
    assert not violations("tokenloom.v1", third_party={"google", "grpc", "typing_extensions"})


def test_what_runs_in_a_peers_environment_needs_nothing_of_ours() -> None:
    package = "tokenloom.bench.peers"
    modules = [module for module in modules_of(package) if not module.name.endswith(".compare")]
    assert not violations(package, third_party=set(), modules=modules)


def test_environment_is_read_at_the_edge_only() -> None:
    """Below settings classes and commands, configuration arrives as arguments."""
    edges = (
        *("tokenloom.cli", "tokenloom.supervisor", "tokenloom.demo_model", "tokenloom.offline.llm"),
        "tokenloom.services.runtime.host.service_settings",
        # Sets the variable that oneDNN reads, and reads none.
        "tokenloom.gpu_worker.kernels.levels",
        # Adds to what the processes that it starts inherit, and reads nothing.
        "tokenloom.services.runtime.helper_process",
        # Where the user keeps caches, as the home directory is read.
        "tokenloom.process",
        # Commands of their own.
        "tokenloom.services.runtime.host.probe",
        *("tokenloom.bench.engine.step_ab", "tokenloom.bench.engine.step_instructions"),
    )
    found = []
    for module in OURS:
        if is_in(module.name, *edges):
            continue
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                found.append(f"{module.path.relative_to(ROOT)}:{node.lineno}")
    assert not found


FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing")
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
EXAMPLES = [Module(path.stem, path, False) for path in sorted((ROOT / "examples").rglob("*.py"))]


def test_nothing_deserializes_code() -> None:
    """No pickle in any form, no eval or exec, no torch.load of anything but weights."""
    modules = OURS + EXAMPLES
    assert len(modules) > 500
    assert not {module.name: found for module in modules if (found := _forbidden(module))}


def _forbidden(module: Module) -> list[str]:
    """Return what a module uses that may run code from data, with lines."""
    found = [f"{name} at {line}" for name, line in module.imports() if is_in(name, *FORBIDDEN_MODULES)]
    for node in ast.walk(module.tree()):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
            found.append(f"allow_pickle at {node.lineno}")
        if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
            found.append(f"{function.id}() at {node.lineno}")
        if isinstance(function, ast.Attribute):
            if function.attr in FORBIDDEN_METHODS:
                found.append(f"{function.attr}() at {node.lineno}")
            if function.attr == "load" and ast.unparse(function) == "torch.load" and not _loads_weights_only(node):
                found.append(f"torch.load() without weights_only at {node.lineno}")
    return found


def _loads_weights_only(call: ast.Call) -> bool:
    return any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", ["pickle at 1"]),
        ("eval('1')", ["eval() at 1"]),
        ("socket.recv_pyobj()", ["recv_pyobj() at 1"]),
        ("numpy.load(path, allow_pickle=True)", ["allow_pickle at 1"]),
        ("torch.load(path)", ["torch.load() without weights_only at 1"]),
        ("torch.load(path, weights_only=True); numpy.load(path, allow_pickle=False); json.load(file)", []),
    ],
)
def test_what_may_run_code_from_data_is_found(source: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert _forbidden(Module("module", path, False)) == expected


def test_links_lead_to_the_top_level_folders() -> None:
    """An editor that opens a fresh clone, an editable installation and a wheel all see one tree."""
    links = {link.name: link.readlink() for link in (ROOT / "tokenloom").iterdir() if link.is_symlink()}
    assert links == {
        "bench": Path("../benchmarks"),
        "engine_core": Path("../engine_core"),
        "gpu_worker": Path("../gpu_worker"),
        "services": Path("../services"),
        "v1": Path("../protos/tokenloom/v1"),
    }


def test_no_module_imports_itself() -> None:
    for module in OURS:
        folder = module.name.rpartition(".")[0]
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.ImportFrom) and not module.is_package:
                source = ".".join(filter(None, [folder, node.module])) if node.level == 1 else node.module
                imported = {source, *(f"{source}.{each.name}" for each in node.names)}
                assert module.name not in imported, f"{module.path}:{node.lineno}"


def test_every_folder_with_modules_is_a_package() -> None:
    """``packages.find`` leaves out a folder that has no ``__init__.py``."""
    folders = {module.path.parent for package in FOLDERS for module in modules_of(package)}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_a_wheel_has_one_top_level_name() -> None:
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"] == {"include": ["tokenloom*"]}
