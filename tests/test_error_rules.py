"""Tasks of the services that handle errors handle all of them: an error that no handler names ends the whole service.

``except OurError`` around I/O, a library or a peer's message lets every other error through, and a task that fails ends
its host. This test finds the coroutines that run as tasks and name errors without naming ``Exception``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SERVICES = Path(__file__).parents[1] / "services"

KEPT = {
    "coordinator/lease.py:acquire": "asks the system for a lock; LeaseApi turns every error into ApiError",
    "coordinator/lease.py:keep": "a lease that is not renewed is lost, and the coordinator ends",
    "coordinator/lease.py:_try": "LeaseApi turns every error of a request into ApiError",
    "encoder/row_maker.py:start": "the service starts, or ends with the error",
    "encoder/sound_files.py:read": "its caller is the edge of one Put",
    "engine/control/data_parallel.py:start_wave": "sends one number to the core, which may be dead or refuse it",
    "engine/core/core_link.py:run_aborts": "sends names to the core, which may be dead or refuse them",
    "engine/core/core_link.py:keep": "awaited by the reader of one stream, and asks the core; no task",
    "engine/kv/kv_loads.py:run": "reads what this engine's own core sends",
    "engine/kv/kv_loads.py:_hold": "its caller is the edge of one load",
    "engine/service.py:_start": "any other error ends the start",
    "engine/running_engine.py:_run_core": "an engine without its core's outputs is to be replaced",
    "gateway/batches/batch_run.py:run": "its caller fails the batch",
    "gateway/files/files_api.py:_read": "called by a request's handler; no task",
    "gateway/routes/models_routes.py:_read": "an HTTP handler; no task",
    "gateway/responses/responses_endpoint.py:_read": "called by a request's handler; no task",
    "gateway/responses/mcp_servers.py:list_tools": "its caller is the edge of one response",
    "relay/http_relay.py:_connect": "opens a connection: OSError, which a time-out is too, and names that are none",
    "relay/http_relay.py:_welcome": "completes a handshake, which raises OSError only",
    "runtime/helper_process.py:run": "its caller is the edge of one call",
    "runtime/helper_process.py:start": "the service starts, or ends with the error",
    "tokenizer/renderer.py:start": "the service starts, or ends with the error",
    "gateway/mesh/encoder_client.py:_answer": "its caller is the edge of one request",
    "gateway/mesh/encoder_client.py:_place": "its caller is the edge of one request",
    "gateway/mesh/encoder_client.py:_release": "its owner logs what else comes, and the lease ends by itself",
    "engine/kv/kv_loads.py:_release": "its caller is the edge of one load",
    "engine/core/vllm_core.py:start": "awaited by the start of the engine, which fails with it; no task",
    "engine/core/vllm_server.py:_read": "awaited by the reader of one answer; no task",
    "output_processor/request/verification.py:ask": "awaited by the task of one request, which logs what else comes",
    "output_processor/request/request_recorder.py:close": "awaited by the end of the service; no task",
    "runtime/local_streams/socket_end.py:read": "awaited by a stream's reader; no task",
    "runtime/host/held_port.py:_connect": "connects a socket, which raises OSError only",
}
"""Why a coroutine may let other errors through, by file and name."""

STARTERS = {"spawn", "_spawn", "create_task", "ensure_future", "first_of"}
BROAD = {"Exception", "BaseException"}
OF_WAITING = {"CancelledError", "TimeoutError", "StopAsyncIteration"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SERVICES.rglob("*.py")):
        yield str(path.relative_to(SERVICES)), ast.parse(path.read_text())


def names_of(kind: ast.expr | None) -> set[str]:
    """Return the last parts of the names of the errors that a handler catches."""
    match kind:
        case None:
            return {"BaseException"}
        case ast.Tuple():
            return set[str]().union(*map(names_of, kind.elts))
        case ast.Attribute():
            return {kind.attr}
        case ast.Name():
            return {kind.id}
    return set()


def started(tree: ast.Module) -> Iterator[str]:
    """Yield the names of coroutines that run as tasks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and names_of(node.func) & STARTERS:
            for argument in node.args:
                if isinstance(argument, ast.Call):
                    yield from names_of(argument.func)


def lets_errors_through(function: ast.AsyncFunctionDef) -> bool:
    """Return whether it names errors around code without a handler, there or around it, for all others."""
    tries = [node for node in ast.walk(function) if isinstance(node, ast.Try)]
    caught = {node: set[str]().union(*(names_of(handler.type) for handler in node.handlers)) for node in tries}
    for node in tries:
        is_named = bool(caught[node] - OF_WAITING)
        is_within = any(caught[other] & BROAD for other in tries if any(inner is node for inner in ast.walk(other)))
        if is_named and not is_within:
            return True
    return False


def test_tasks_that_handle_errors_handle_all() -> None:
    names = {name for _, tree in modules() for name in started(tree)}
    assert {"_run", "run", "watch"} <= names, "the search finds tasks"
    found = {
        f"{path}:{node.name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and node.name in names and lets_errors_through(node)
    }
    assert not found - KEPT.keys(), "catch Exception too, or say in KEPT why no other error can come"
    assert not KEPT.keys() - found, "these are no more"
