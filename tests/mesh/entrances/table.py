"""The table of entrances and guards: where each guard acts at each entrance, or why there is nothing to guard.

The entrances are those that the gateway has: the routes of its application and the methods of its protos. An entrance
that is missing here fails ``test_entrances.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.mesh.entrances.calls import GENERATING, POOLING, TOKENIZING

GUARDS = ("key", "tenant share", "outputs", "tokens", "bytes", "bytes kept", "deadline", "idle time", "charge once")
"""The key; ``live_outputs`` of the tenant; ``--max-live-requests``; ``tokens_per_second``; ``body_bytes``;
``--max-kept-prompt-bytes``; ``--request-timeout``; how long a client that sends nothing keeps what it holds; tokens
charged once, by position."""


@dataclass(frozen=True)
class Probed:
    """``test_entrances.py`` calls the entrance and sees the guard act."""


@dataclass(frozen=True)
class Shown:
    """Another test shows it. ``test``: its file and name."""

    test: str


@dataclass(frozen=True)
class Nothing:
    """There is nothing to guard. ``reason``: why."""

    reason: str


Cell = Probed | Shown | Nothing
Row = Mapping[str, Cell]

_NO_ENGINE = Nothing("no engine computes for it")
_MEMORY = Nothing("the gateway answers from its memory, without a wait")
_OPERATOR = Nothing("an operator belongs to no tenant, and an engine has a time limit for each of its calls")
_ONE_MESSAGE = Shown("tests/services/runtime/host/test_outside_calls.py::test_a_call_without_its_message_ends")
_NO_BODY = Nothing("it reads no body")
_FILES = "tests/services/gateway/files/test_files_api.py::test_limits_of_a_tenant"
_DISK = Nothing("it waits for the local disk only")

KEY, SHARE, OUTPUTS, TOKENS, BYTES, KEPT, DEADLINE, IDLE, CHARGE = GUARDS


def _row(default: Cell, **cells: Cell) -> Row:
    """Return ``default`` for each guard but those that are named by the names of the constants above."""
    names = {
        "key": KEY,
        "share": SHARE,
        "bytes_": BYTES,
        "kept": KEPT,
        "deadline": DEADLINE,
        "idle": IDLE,
        "charge": CHARGE,
    }
    return dict.fromkeys(GUARDS, default) | {names[name]: cell for name, cell in cells.items()}


_READS = _row(_MEMORY, key=Probed())
_OPEN = _row(_MEMORY, key=Nothing("load balancers and browsers have no key; it shows nothing of a tenant"))
_ADMIN = _row(_OPERATOR, key=Probed())
_ADMIN_BODY = _row(_OPERATOR, key=Probed(), idle=Probed())
_TOKENIZES = _row(_NO_ENGINE, key=Probed(), bytes_=Probed(), deadline=Probed(), idle=Probed())
_STORES = _row(_NO_ENGINE, key=Probed(), deadline=_DISK, bytes_=Probed(), idle=Probed())
_UPLOAD = _row(_NO_ENGINE, key=Probed(), deadline=_DISK, bytes_=Shown(_FILES), idle=Probed())
_TRANSCRIBES = "tests/services/gateway/openai/test_transcription_limits.py::"
_SOUND: Row = {  # the model of the mesh here reads texts, and refuses sounds before it reads them
    **_row(Shown(_TRANSCRIBES + "test_limits_of_a_tenant"), key=Probed()),
    OUTPUTS: Shown(_TRANSCRIBES + "test_a_full_gateway"),
    KEPT: Shown("tests/services/gateway/mesh/test_moved_requests.py::test_a_prompt_beyond_the_budget_is_not_kept"),
    DEADLINE: Shown(_TRANSCRIBES + "test_a_piece_that_takes_too_long"),
    IDLE: Shown(_TRANSCRIBES + "test_an_upload_that_stops"),
    CHARGE: Shown(_TRANSCRIBES + "test_tokens_are_charged_once"),
}
_HEARS = "tests/services/gateway/grpc/test_transcribe.py::"
_SOUND_IN_PARTS: Row = {
    **_SOUND,
    SHARE: Shown(_HEARS + "test_limits_of_a_tenant"),
    OUTPUTS: Shown(_HEARS + "test_a_full_gateway"),
    TOKENS: Shown(_HEARS + "test_limits_of_a_tenant"),
    BYTES: Shown(_HEARS + "test_a_sound_larger_than_the_limit_is_refused"),
    DEADLINE: Shown(_HEARS + "test_a_piece_that_takes_too_long"),
    IDLE: Shown(_HEARS + "test_a_sound_that_stops"),
    CHARGE: Shown(_HEARS + "test_tokens_are_charged_once"),
}
_STORED = _row(_NO_ENGINE, key=Probed(), deadline=_DISK, bytes_=_NO_BODY, idle=_NO_BODY)
_KEEPS = _row(_MEMORY, key=Probed(), bytes_=_NO_BODY)
_RECALLS = _row(
    Nothing("it reads memory, or continues in the background what another gateway began, as the row of that says"),
    key=Probed(),
    bytes_=_NO_BODY,
)
_KEEPS_BODY = _row(_MEMORY, key=Probed(), bytes_=Probed(), idle=Probed())
_CALLS = _row(Probed(), idle=_ONE_MESSAGE)
_WAITS = _row(Probed())
_NAMED = "the route of the plain request has this cell"
_LINE = _row(
    Probed(),
    key=Nothing("its tenant is that of the key that created the batch"),
    idle=Nothing("no client waits for it"),
    deadline=Nothing("a line that took too long is sent again until its batch expires"),
)
_BACKGROUND = _row(Probed(), key=Nothing(_NAMED), idle=Nothing("no client waits for it"))

_CONTINUES = Nothing("it takes over what its request holds; the tenant's share shows that")
_SAME_ROUTE = _row(_CONTINUES, key=Nothing(_NAMED), share=Probed(), kept=Probed(), deadline=Probed(), charge=Probed())


def _computes(name: str) -> Row:
    return _WAITS if name.startswith("POST ") or name.endswith(("Session", "StreamInfer")) else _CALLS


def _each(names: str, row: Row) -> Mapping[str, Row]:
    return {name.strip(): row for name in names.split(",")}


TABLE: Mapping[str, Row] = {
    **{name: _computes(name) for name in (*GENERATING, *POOLING)},
    "Inference/Resume": _row(
        _CONTINUES, key=Probed(), share=Probed(), kept=Probed(), deadline=Probed(), charge=Probed()
    ),
    "POST /v1/completions with Last-Event-ID": _SAME_ROUTE,
    "POST /v1/completions with Idempotency-Key": _SAME_ROUTE,
    "POST /v1/responses in the background": _BACKGROUND,
    "a line of POST /v1/batches": _LINE,
    **dict.fromkeys(TOKENIZING, _TOKENIZES),
    "POST /v1/batches": _STORES,
    "POST /v1/files": _UPLOAD,
    **_each("POST /v1/audio/transcriptions, POST /v1/audio/translations", _SOUND),
    "Inference/Transcribe": _SOUND_IN_PARTS,
    **_each("GET /v1/files, GET /v1/files/*, DELETE /v1/files/*, GET /v1/files/*/content", _STORED),
    **_each("GET /v1/batches, GET /v1/batches/*, POST /v1/batches/*/cancel", _STORED),
    **_each("GET /v1/responses/*, DELETE /v1/responses/*, POST /v1/responses/*/cancel", _RECALLS),
    **_each("GET /v1/conversations/*, DELETE /v1/conversations/*, GET /v1/conversations/*/items", _KEEPS),
    **_each("GET /v1/conversations/*/items/*, DELETE /v1/conversations/*/items/*", _KEEPS),
    **_each("POST /v1/conversations, POST /v1/conversations/*, POST /v1/conversations/*/items", _KEEPS_BODY),
    **_each("GET /, GET /health, GET /ping, POST /ping, GET /docs, GET /openapi.json, GET /page/*", _OPEN),
    **_each("GET /v1/models, GET /v1/models/tokenloom-demo, GET /v1/models/*, GET /model_info", _READS),
    **_each("GET /version, GET /load, GET /server_info, GET /metrics, GET /mesh, GET /traffic", _READS),
    **_each("GET /api/tags, GET /api/ps, GET /api/version, POST /api/show, POST /api/pull", _READS),
    "POST /mesh/kill_engine": _READS,
    **_each("POST /api/create, POST /api/copy, POST /api/push, DELETE /api/delete", _READS),
    **_each("Inference/Cancel, Inference/ListModels", _READS),
    **_each("GRPCInferenceService/ServerLive, GRPCInferenceService/ServerReady", _READS),
    **_each("GRPCInferenceService/ModelReady, GRPCInferenceService/ServerMetadata", _READS),
    **_each("GRPCInferenceService/ModelMetadata", _READS),
    **_each("VllmEngine/HealthCheck, VllmEngine/Abort, VllmEngine/GetModelInfo, VllmEngine/GetServerInfo", _READS),
    **_each("POST /pause, POST /resume, GET /is_paused, POST /sleep, POST /wake_up, GET /is_sleeping", _ADMIN),
    **_each("POST /reload_weights, POST /reset_prefix_cache, POST /start_profile, POST /stop_profile", _ADMIN),
    **_each("POST /move_requests", _ADMIN),
    **_each("POST /reset_mm_cache, POST /reset_encoder_cache", _ADMIN),
    **_each("GET /v1/lora_adapters, GET /requests", _ADMIN),
    **_each("POST /v1/load_lora_adapter, POST /v1/unload_lora_adapter, POST /v1/pin_lora_adapter", _ADMIN_BODY),
}


def probed(guard: str) -> list[str]:
    """Return the entrances at which ``test_entrances.py`` sees a guard act."""
    return [name for name, row in TABLE.items() if isinstance(row[guard], Probed)]
