"""The table of all routes of the HTTP API, in the order of the OpenAPI document.

To add a route, write its row here and bind a handler to its name in ``routes/api_routes.py``, or in
``routes/admin_routes.py`` if operators alone may call it. The fields of its body are a class of ``request_schemas``,
and those of its answer one of ``response_schemas``. The application and the document derive from the row.
"""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from tokenloom.request.sampling_params import SamplingFields

from ..http.route import Route
from ..request_log.finished_request import LastRequests
from . import batch_schemas as batches
from . import ollama_schemas as ollama
from . import pooling_schemas as pooling
from . import request_schemas as bodies
from . import response_schemas as answers
from . import token_schemas as tokens
from . import transcription_schemas as transcription
from .request_schemas import CountTokensRequest, MessagesRequest, ResponsesRequest

_Fields = ParamSpec("_Fields")

ROUTES: list[Route] = []
"""All of them but the paths of single models and of the page's files, which no table can list in advance."""


def _listed(make: Callable[_Fields, Route]) -> Callable[_Fields, Route]:
    """Return what makes a route and adds it to the table."""

    def listed(*fields: _Fields.args, **named: _Fields.kwargs) -> Route:
        ROUTES.append(make(*fields, **named))
        return ROUTES[-1]

    return listed


_route = _listed(Route)


_CHAT = bodies.with_sampling(bodies.ChatCompletionRequest)
_COMPLETION = bodies.with_sampling(bodies.CompletionRequest)
_MESSAGES = bodies.with_sampling(MessagesRequest, SamplingFields, without=("logprobs", "prompt_logprobs"))
_RESPONSES = bodies.with_sampling(
    ResponsesRequest, SamplingFields, without=("logprobs", "prompt_logprobs", "max_tokens")
)
_ASKING = {
    "Idempotency-Key": {
        "type": "string",
        "pattern": "^[ -~]{1,255}$",
        "description": "Names the request. A repeat with the same key and body gets the answer of the first one, which "
        "it takes over if it still runs; with another body, 422.",
    },
    "Last-Event-ID": {
        "type": "string",
        "pattern": "^(|0|[0-9a-f]{40}[.][0-9a-f]{1,9}[.][-_0-9efn]{1,900}([.]u)?)$",
        "description": "For streams. Empty: none. 0: write an id into each event. The id of the last event that "
        "arrived, with the same body: continue the answer after that event. 404 REQUEST_LOST: send the request again "
        "without it.",
    },
}
MODELS = _route("GET", "/v1/models", "The served model", answers.ModelList)
MODEL = _route("GET", "/v1/models/{model}", "One model", answers.ModelCard)
CHAT = _route(
    "POST",
    "/v1/chat/completions",
    "Answer in a conversation",
    answers.ChatCompletion,
    _CHAT,
    streams=True,
    headers=_ASKING,
    is_pure=True,
)
COMPLETIONS = _route(
    "POST",
    "/v1/completions",
    "Continue prompts",
    answers.Completion,
    _COMPLETION,
    streams=True,
    headers=_ASKING,
    is_pure=True,
)
RENDER_CHAT = _route(
    "POST",
    "/v1/chat/completions/render",
    "What a conversation becomes: token ids and sampling parameters",
    tokens.RenderedRequest,
    _CHAT,
    is_pure=True,
)
RENDER_COMPLETIONS = _route(
    "POST",
    "/v1/completions/render",
    "What prompts become: a list of requests in token ids",
    tokens.RenderedRequest,
    _COMPLETION,
    answers_list=True,
    is_pure=True,
)
DERENDER_CHAT = _route(
    "POST",
    "/v1/chat/completions/derender",
    "A chat's answer of generated tokens",
    tokens.Derendered,
    tokens.DerenderChatRequest,
    is_pure=True,
)
DERENDER_COMPLETIONS = _route(
    "POST",
    "/v1/completions/derender",
    "A completion's answer of generated tokens",
    tokens.Derendered,
    tokens.DerenderCompletionRequest,
    is_pure=True,
)
GENERATE_TOKENS = _route(
    "POST",
    "/inference/v1/generate",
    "Continue token ids with token ids",
    tokens.GeneratedTokens,
    tokens.TokenGenerationRequest,
    streams=True,
    headers=_ASKING,
    is_pure=True,
)
OF_TOKENS = (RENDER_CHAT, RENDER_COMPLETIONS, DERENDER_CHAT, DERENDER_COMPLETIONS, GENERATE_TOKENS)
"""What takes or gives token ids in place of texts."""
RESPONSES = _route(
    "POST",
    "/v1/responses",
    "Answer in a stored conversation",
    answers.Response,
    _RESPONSES,
    streams=True,
    headers=_ASKING,
    is_pure=True,
)
RESPONSE = _route(
    "GET",
    "/v1/responses/{id}",
    "A stored response, or its events",
    answers.Response,
    streams=True,
    query={
        "stream": {
            "type": "boolean",
            "description": "Answer with the events of a response that was begun with background and stream.",
        },
        "starting_after": {
            "type": "integer",
            "minimum": 0,
            "description": "With stream: only the events after the one with this sequence_number.",
        },
    },
)
DELETE_RESPONSE = _route(
    "DELETE",
    "/v1/responses/{id}",
    "Forget a response; end its generation",
    answers.DeletedResponse,
)
CANCEL_RESPONSE = _route(
    "POST",
    "/v1/responses/{id}/cancel",
    "End the generation of a response in the background",
    answers.Response,
)
COMPACT_RESPONSE = _route(
    "POST",
    "/v1/responses/compact",
    "Summarize a conversation, for later requests in its place",
    answers.Compaction,
    _RESPONSES,
    is_pure=True,
)
TRANSCRIBE = _route(
    "POST",
    "/v1/audio/transcriptions",
    "What is said in a sound",
    transcription.Transcript,
    transcription.TranscriptionForm,
    is_form=True,
    streams=True,
    is_pure=True,
)
TRANSLATE = _route(
    "POST",
    "/v1/audio/translations",
    "What is said in a sound, in English",
    transcription.Transcript,
    transcription.TranslationForm,
    is_form=True,
    streams=True,
    is_pure=True,
)
_PAGE: Mapping[str, Mapping[str, Any]] = {
    "after": {"type": "string", "description": "Id of the last object of the page before."},
    "limit": {"type": "integer", "minimum": 1, "description": "How many objects to return."},
}
_ORDER: Mapping[str, Any] = {"enum": ["asc", "desc"], "description": "desc: the newest first (default)."}
_ITEM_PAGE: Mapping[str, Mapping[str, Any]] = {**_PAGE, "order": _ORDER}
CREATE_CONVERSATION = _route(
    "POST",
    "/v1/conversations",
    "Begin a conversation, to which responses add",
    answers.ConversationObject,
    bodies.ConversationRequest,
)
CONVERSATION = _route("GET", "/v1/conversations/{id}", "A conversation without its items", answers.ConversationObject)
UPDATE_CONVERSATION = _route(
    "POST",
    "/v1/conversations/{id}",
    "Other metadata for a conversation",
    answers.ConversationObject,
    bodies.ConversationUpdate,
)
DELETE_CONVERSATION = _route("DELETE", "/v1/conversations/{id}", "Forget a conversation", answers.DeletedResponse)
CONVERSATION_ITEMS = _route(
    "GET", "/v1/conversations/{id}/items", "Items of a conversation", answers.ConversationItems, query=_ITEM_PAGE
)
ADD_ITEMS = _route(
    "POST",
    "/v1/conversations/{id}/items",
    "Add items to a conversation",
    answers.ConversationItems,
    bodies.ConversationAddition,
)
CONVERSATION_ITEM = _route(
    "GET", "/v1/conversations/{id}/items/{item_id}", "An item of a conversation", answers.ConversationItem
)
DELETE_ITEM = _route(
    "DELETE",
    "/v1/conversations/{id}/items/{item_id}",
    "Leave an item out of a conversation",
    answers.ConversationObject,
)
MESSAGES = _route(
    "POST",
    "/v1/messages",
    "Answer in a conversation, in Anthropic's form",
    answers.AnthropicMessage,
    _MESSAGES,
    streams=True,
    error=answers.MessageErrorResponse,
    is_pure=True,
)
COUNT_TOKENS = _route(
    "POST",
    "/v1/messages/count_tokens",
    "Count the tokens of a conversation, in Anthropic's form",
    answers.TokenCount,
    CountTokensRequest,
    error=answers.MessageErrorResponse,
    is_pure=True,
)
TOKENIZE = _route(
    "POST",
    "/tokenize",
    "Encode a prompt or a conversation",
    answers.TokenizeResponse,
    bodies.TokenizeRequest,
    is_pure=True,
)
EMBEDDINGS = _route(
    "POST", "/v1/embeddings", "Vectors of texts", pooling.EmbeddingList, pooling.EmbeddingRequest, is_pure=True
)
CLASSIFY = _route(
    "POST", "/classify", "Classes of texts", pooling.ClassificationList, pooling.ClassifyRequest, is_pure=True
)
POOLING = _route(
    "POST", "/pooling", "What a pooling task computes", pooling.PoolingList, pooling.PoolingRequest, is_pure=True
)
SCORES = tuple(
    _route("POST", path, "Relevance of texts to texts", pooling.ScoreList, pooling.ScoreRequest, is_pure=True)
    for path in ("/score", "/v1/score")
)
RERANKS = tuple(
    _route("POST", path, "Documents by their relevance", pooling.Ranking, pooling.RerankRequest, is_pure=True)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
)
DETOKENIZE = _route(
    "POST", "/detokenize", "Decode token ids", answers.DetokenizeResponse, bodies.DetokenizeRequest, is_pure=True
)
HEALTH = _route(
    "GET", "/health", "Whether the gateway can answer requests", answers.Status, may_be_away=True, is_open=True
)
PING = _route("GET", "/ping", "As /health", answers.Status, may_be_away=True, is_open=True)
POST_PING = _route("POST", "/ping", "As /health", answers.Status, may_be_away=True, is_open=True, is_pure=True)
VERSION = _route("GET", "/version", "Version of the gateway", answers.Version)
LOAD = _route("GET", "/load", "Load of this gateway", answers.ServerLoad)
SERVER_INFO = _route("GET", "/server_info", "The mesh behind this gateway", answers.ServerInfo)
MODEL_INFO = _route("GET", "/model_info", "The model, as SGLang reports it to routers", answers.ServedModelInfo)
METRICS = _route("GET", "/metrics", "Prometheus metrics")

_FILES: Mapping[str, Mapping[str, Any]] = {
    **_PAGE,
    "order": _ORDER,
    "purpose": {"type": "string", "description": "Only files of this purpose."},
}
FILES = _route("GET", "/v1/files", "The stored files", batches.FileList, query=_FILES, is_of_batches=True)
UPLOAD_FILE = _route(
    "POST",
    "/v1/files",
    "Store a file of requests for a batch",
    batches.File,
    batches.UploadFileRequest,
    is_form=True,
    is_of_batches=True,
)
FILE = _route("GET", "/v1/files/{id}", "A stored file", batches.File, is_of_batches=True)
DELETE_FILE = _route("DELETE", "/v1/files/{id}", "Delete a file", batches.DeletedFile, is_of_batches=True)
FILE_CONTENT = _route(
    "GET", "/v1/files/{id}/content", "What a file holds", media_type="application/octet-stream", is_of_batches=True
)
BATCHES = _route("GET", "/v1/batches", "The batches", batches.BatchList, query=_PAGE, is_of_batches=True)
CREATE_BATCH = _route(
    "POST",
    "/v1/batches",
    "Answer the requests of a file",
    batches.BatchObject,
    batches.CreateBatchRequest,
    is_of_batches=True,
)
BATCH = _route("GET", "/v1/batches/{id}", "A batch", batches.BatchObject, is_of_batches=True)
CANCEL_BATCH = _route(
    "POST",
    "/v1/batches/{id}/cancel",
    "Stop a batch; its answers so far are kept",
    batches.BatchObject,
    is_of_batches=True,
)
_BOOLEAN = {"type": "boolean"}
_MODE = {"enum": ["abort", "wait", "keep"], "description": "What happens to running requests; default: abort."}
PAUSE = _route(
    "POST",
    "/pause",
    "Pause every engine",
    answers.EnginesChanged,
    query={"mode": _MODE, "clear_cache": {**_BOOLEAN, "description": "Forget cached prefixes too (default)."}},
    is_admin=True,
)
RESUME = _route("POST", "/resume", "Resume every engine", answers.EnginesChanged, is_admin=True)
IS_PAUSED = _route("GET", "/is_paused", "Whether every engine is paused", answers.EnginesPaused, is_admin=True)
SLEEP = _route(
    "POST",
    "/sleep",
    "Release the engines' memory",
    answers.EnginesChanged,
    query={"level": {"enum": [0, 1, 2], "description": "Sleep level; default: 1."}, "mode": _MODE},
    is_admin=True,
)
WAKE_UP = _route(
    "POST",
    "/wake_up",
    "Allocate the memory again",
    answers.EnginesChanged,
    query={
        "tags": {
            "type": "array",
            "items": {"enum": ["weights", "kv_cache", "scheduling"]},
            "description": "What to wake; default: all.",
        }
    },
    is_admin=True,
)
IS_SLEEPING = _route("GET", "/is_sleeping", "Whether every engine sleeps", answers.EnginesSleeping, is_admin=True)
RELOAD_WEIGHTS = _route(
    "POST",
    "/reload_weights",
    "Load other weights into every engine",
    answers.EnginesChanged,
    query={
        "path": {"type": "string", "description": "Absolute path of a checkpoint of the same architecture; required."},
        "model": {"type": "string", "description": "Whose engines; required if the gateway serves several models."},
        "mode": {
            "enum": ["wait", "abort", "keep"],
            "description": "What happens to requests that have begun: they end with the old weights (default), end at "
            "once, or go on with the new ones, which compute their KV anew. In a pause the pause's mode counts.",
        },
    },
    is_admin=True,
)
RESET_PREFIX_CACHE = _route(
    "POST",
    "/reset_prefix_cache",
    "Forget cached prefixes",
    answers.EnginesDone,
    query={
        "reset_running_requests": {**_BOOLEAN, "description": "Preempt running requests rather than refuse."},
    },
    is_admin=True,
)
RESET_MM_CACHE = _route(
    "POST",
    "/reset_mm_cache",
    "Forget files of images, and their rows",
    answers.EncodersDone,
    is_admin=True,
)
RESET_ENCODER_CACHE = _route(
    "POST",
    "/reset_encoder_cache",
    "Forget rows of images",
    answers.EncodersDone,
    is_admin=True,
)
MOVE_REQUESTS = _route(
    "POST",
    "/move_requests",
    "Let running requests go on at other engines",
    answers.RequestsMoved,
    query={
        "request_id": {"type": "string", "description": "The id of one answer, with all of its choices."},
        "source": {"type": "string", "description": "In place of request_id: all requests of this engine."},
        "target": {"type": "string", "description": "The engine that goes on; default: the coordinator picks."},
    },
    is_admin=True,
)
LOAD_ADAPTER = _route(
    "POST",
    "/v1/load_lora_adapter",
    "Load a LoRA adapter on every engine, or on none",
    answers.EnginesChanged,
    bodies.LoadAdapter,
    is_admin=True,
)
UNLOAD_ADAPTER = _route(
    "POST",
    "/v1/unload_lora_adapter",
    "Unload a LoRA adapter from every engine",
    answers.EnginesChanged,
    bodies.AdapterBody,
    is_admin=True,
)
PIN_ADAPTER = _route(
    "POST",
    "/v1/pin_lora_adapter",
    "Keep a LoRA adapter on every engine's device",
    answers.EnginesChanged,
    bodies.PinAdapter,
    is_admin=True,
)
ADAPTERS = _route("GET", "/v1/lora_adapters", "LoRA adapters and where they are", answers.LoadedAdapters, is_admin=True)
LAST_REQUESTS = _route("GET", "/requests", "The last requests of this gateway", LastRequests, is_admin=True)
START_PROFILE = _route(
    "POST",
    "/start_profile",
    "Start recording steps",
    answers.EnginesDone,
    query={"profile_prefix": {"type": "string", "description": "The names of the files begin with it; default: none."}},
    is_admin=True,
)
STOP_PROFILE = _route("POST", "/stop_profile", "Write the recorded steps", answers.EnginesDone, is_admin=True)

_MODEL = {"model": {"type": "string", "description": "Name of a served model; default: the first one."}}
MESH = _route("GET", "/mesh", "The parts of the mesh, for the page", answers.MeshState, query=_MODEL)
TRAFFIC = _route("GET", "/traffic", "The last ten minutes, for the page", answers.TrafficColumns, query=_MODEL)
OLLAMA_CHAT = _route(
    "POST",
    "/api/chat",
    "Answer in a conversation, in Ollama's form",
    ollama.OllamaResponse,
    ollama.OllamaRequest,
    streams_lines=True,
    error=ollama.OllamaErrorResponse,
    is_pure=True,
)
OLLAMA_GENERATE = _route(
    "POST",
    "/api/generate",
    "Answer one prompt, in Ollama's form",
    ollama.OllamaResponse,
    ollama.OllamaRequest,
    streams_lines=True,
    error=ollama.OllamaErrorResponse,
    is_pure=True,
)
OLLAMA_EMBED = _route(
    "POST",
    "/api/embed",
    "Vectors of texts, in Ollama's form",
    ollama.OllamaVectors,
    ollama.OllamaEmbedRequest,
    error=ollama.OllamaErrorResponse,
    is_pure=True,
)
OLLAMA_EMBEDDINGS = _route(
    "POST",
    "/api/embeddings",
    "The vector of one text, in Ollama's older form",
    ollama.OllamaVector,
    ollama.OllamaEmbedRequest,
    error=ollama.OllamaErrorResponse,
    is_pure=True,
)
OLLAMA_SHOW = _route(
    "POST",
    "/api/show",
    "One model, in Ollama's form",
    ollama.OllamaModelDescription,
    ollama.OllamaModelRequest,
    error=ollama.OllamaErrorResponse,
    is_pure=True,
)
OLLAMA_VERSION = _route("GET", "/api/version", "Version of Ollama's API", ollama.OllamaVersion)
OLLAMA_TAGS = _route("GET", "/api/tags", "The served models, in Ollama's form", ollama.OllamaModelList)
OLLAMA_PS = _route("GET", "/api/ps", "The models in memory, in Ollama's form", ollama.OllamaModelList)
OLLAMA_PULL = _route(
    "POST",
    "/api/pull",
    "Whether a model is served, in Ollama's form",
    ollama.OllamaPulled,
    ollama.OllamaModelRequest,
    streams_lines=True,
    error=ollama.OllamaErrorResponse,
)

# What the document leaves out: pages, the button of a demo, and what Ollama's clients may ask for and a mesh refuses.
ROOT = _route("GET", "/", is_open=True)  # clients ask for HEAD / to learn whether a server is there
KILL_ENGINE = _route("POST", "/mesh/kill_engine")
DOCUMENT = _route("GET", "/openapi.json", is_open=True)
DOCUMENT_PAGE = _route("GET", "/docs", is_open=True)
OLLAMA_MANAGEMENT = (
    *(_route("POST", f"/api/{name}") for name in ("create", "copy", "push")),
    _route("DELETE", "/api/delete"),
)
