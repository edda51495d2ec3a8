"""Options of a gateway."""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta

from tokenloom.process.plugins import check_named, plugged
from tokenloom.request.reasoning import PARSERS
from tokenloom.request.tool_format import TOOL_PARSERS
from tokenloom.services.runtime.addresses import DNS, parse
from tokenloom.services.runtime.host.limits import GrpcLimits, for_clients
from tokenloom.services.runtime.host.service_settings import (
    Address,
    Count,
    Descriptor,
    OptionalAddress,
    PublicSettings,
    check_members,
)
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles

from ..tenants.tenant import TenantLimits

DEFAULT_QUEUE_SECONDS: Final = 10.0
"""A person who waits longer for the first word has often given up."""
ALWAYS_QUEUED: Final = 32
"""Outputs that may wait whatever the estimate says: few requests are no overload, and rates that were measured with few
are unreliable."""
DEFAULT_MAX_VALUES = 1 << 21
"""16,384 tokens of 128 samples, or 100,000 tokens with 20 alternatives each."""
FRONTS: Final = {
    "kserve": "tokenloom.services.gateway.kserve.kserve_servicer:kserve",
    "vllm": "tokenloom.services.gateway.grpc.vllm_servicer:vllm",
}
"""The fronts that are built in, and where each one is; only those that are chosen are imported."""
DEFAULT_UNATTENDED_SECONDS: Final = 15.0
"""A client of ours notices a dead connection after 10 s at most; the gateway may have noticed it at once."""


def _check_members(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("must hold at least one address")
    return check_members(values)


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Called only for keys that were given: an empty key must not open the gateway to every client."""
    if not keys:
        raise ValueError("holds no key; leave the option out to serve clients without a key")
    return keys


_Secret = Annotated[str, Meta(extra={"secret": True})]
NUM_EDGES = 2
"""HTTP and gRPC: each has connections of its own."""
MAX_STREAMS = 1024
"""gRPC calls of one connection; clients keep further ones back."""

_Members = Annotated[tuple[str, ...], Meta(extra={"check": _check_members})]
_Keys = Annotated[tuple[str, ...], Meta(extra={"check": _check_keys, "secret": True})]


class GatewaySettings(PublicSettings, frozen=True, kw_only=True):
    """The public edges: addresses, API keys, certificates, limits and parsers."""

    service: ClassVar[str] = "gateway"

    http_listen: Annotated[Address, "Address of the OpenAI API: host:port or unix:/path."] = "127.0.0.1:8000"
    http_listen_fd: Annotated[
        Descriptor | None,
        "Descriptor of an inherited socket that listens on --http-listen. It keeps connections waiting while the "
        "gateway restarts.",
    ] = None
    internal_listen: Annotated[
        OptionalAddress,
        "Address (host:port) at which peers with a certificate of the mesh get the HTTP API with kv_transfer_params; "
        "empty: none. Needs --tls-ca, --tls-cert and --tls-key.",
    ] = ""
    listen_fd: Annotated[
        Descriptor | None,
        "Descriptor of an inherited socket that listens on --listen and shares the port, as tokenloom serve opens it.",
    ] = None
    tokenizers: Annotated[
        _Members,
        "Addresses of tokenizers, separated by commas; dns:///name:port stands for every address that "
        "DNS has for the name.",
    ]
    output_processors: Annotated[_Members, "Addresses of output processors, in the form of --tokenizers."]
    coordinator: Annotated[Address, "Address of the coordinator."]
    peer_subset: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)],
        "Output processors, and tokenizers, that this gateway works with when there are more: the gateways share them "
        "out evenly. Requests that are resumed or have an idempotency key connect it to all for a minute.",
    ] = 32
    served_model_name: Annotated[
        tuple[str, ...],
        "Model names for clients, separated by commas; the first one stands in answers and metrics. By default the "
        "name that the tokenizer serves.",
    ] = ()
    meshes: Annotated[
        Path | None,
        "File (.toml, .json or .yaml) with a table [[mesh]] for each further mesh behind this gateway: "
        "served_model_name, tokenizers, output_processors and coordinator. Requests go by their model.",
    ] = None
    api_key: Annotated[
        _Keys, "Accepted API keys, separated by commas; without this and --api-key-file no key is needed."
    ] = ()
    api_key_file: Annotated[
        Path | None, "File with the SHA-256 of an accepted key, in hex, on each line; or tenants in TOML."
    ] = None
    authentication: Annotated[
        Annotated[str, Meta(extra=plugged("authentication"))],
        "Plugin that knows further API keys, as PACKAGE:NAME; empty: none.",
    ] = ""
    fronts: Annotated[
        Annotated[tuple[str, ...], Meta(extra=plugged("fronts", tuple(FRONTS)))],
        "Protocols of clients beside OpenAI's and the others over HTTP, and the public gRPC API: kserve: the Open "
        "Inference Protocol; vllm: the contract of vLLM's engines, both over gRPC; or plugins, as PACKAGE:NAME. Empty: "
        "none.",
    ] = tuple(FRONTS)
    cache_salt_secret: Annotated[
        _Secret,
        "Secret of at least 16 bytes, equal for all gateways, that separates the tenants' cached prefixes; by default "
        "each gateway with API keys draws its own.",
    ] = ""
    cache_salt_secret_file: Annotated[Path | None, "File with that secret; it wins over --cache-salt-secret."] = None
    admin_api_key: Annotated[
        _Keys, "Keys for the admin routes; without this and --admin-api-key-file these are not served."
    ] = ()
    admin_api_key_file: Annotated[Path | None, "File of admin keys, as --api-key-file."] = None
    operator_tls_cert: Annotated[
        Path | None, "Certificate that the admin routes present to engines, in a mesh with certificates."
    ] = None
    operator_tls_key: Annotated[Path | None, "Private key of that certificate."] = None
    cors_origins: Annotated[
        tuple[str, ...], "Origins of web pages that may call the API from a browser, separated by commas; *: all."
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        "Further host names under which a gateway without API keys may be called, separated by commas; *: all.",
    ] = ()
    page: Annotated[
        bool, "Serve a page for browsers at /: the mesh, a playground and the last ten minutes of traffic."
    ] = True
    page_kills: Annotated[
        Path | None,
        "Socket of the supervisor by which a button of the page kills an engine, as tokenloom demo --keep sets it. "
        "--http-listen must be an address of this machine alone.",
    ] = None
    strict: Annotated[bool, "Refuse unknown request fields instead of ignoring them."] = False
    tool_call_parser: Annotated[
        Annotated[str, Meta(extra=plugged("tool_formats", TOOL_PARSERS))],
        "How the model writes tool calls; auto: as its chat template indicates; or a plugin, as PACKAGE:NAME.",
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        "Leave the tools out of the prompt of a request that forbids calls. By default the prompt stays as it is with "
        "calls, so that its beginning is cached.",
    ] = False
    reasoning_parser: Annotated[
        Annotated[str, Meta(extra=plugged("reasoning_formats", PARSERS))],
        "How the model writes reasoning; auto: as its chat template indicates; or a plugin, as PACKAGE:NAME.",
    ] = "auto"
    volatile_lines: Annotated[
        Literal["move", "keep"],
        "Lines of system prompts that a known client changes with each request or day: move takes out those that are "
        "not meant for the model and moves the others to the end of the system prompt, so that the rest is cached, and "
        "names them in the response header x-tokenloom-volatile; keep leaves prompts as they are.",
    ] = "move"
    replay_ids: Annotated[
        bool,
        "Put the tokens that the model generated into the prompts of the turns after them, wherever the client sends "
        "the same answer back and a fresh tokenization gives others, so that more is cached. An answer then depends on "
        "what this gateway remembers of the conversation. By default every prompt is tokenized from its text.",
    ] = False
    access_log: Annotated[
        bool,
        "Log a line for each request that has ended: ids, status, sizes and times, without prompts and keys. "
        "Successful probes and scrapes have none.",
    ] = True
    max_media_bytes_in_flight: Annotated[
        Count,
        "Bytes of images, decoded, that requests in work hold at the same time, and of one request at most; further "
        "ones are refused with a retryable error. They count for no other limit of bodies.",
    ] = 256 << 20
    max_audio_bytes: Annotated[
        Count, "Largest upload of /v1/audio/transcriptions and /v1/audio/translations; OpenAI takes 25 MB."
    ] = 256 << 20
    max_audio_bytes_in_flight: Annotated[
        Count,
        "Bytes of these uploads that are on disk, in the directory for temporary files, while their requests run; "
        "further ones are refused with a retryable error.",
    ] = 2 << 30
    max_stored_response_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Bytes of responses of /v1/responses that this gateway keeps for previous_response_id; the oldest ones are "
        "dropped. 0: it keeps none, and none runs in the background.",
    ] = 64 << 20
    max_stored_media_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Bytes of the images of stored responses that this gateway keeps for previous_response_id and conversations; "
        "the oldest ones are dropped. 0: it keeps none, and encoders only as long as they have room.",
    ] = 256 << 20
    mcp_servers: Annotated[
        Path | None,
        "File (.toml, .json or .yaml) with a table [[server]] for each MCP server whose tools the gateway runs for "
        "/v1/responses: name, url, and if wanted headers_file, allowed_tools, tenants, client_headers, timeout and "
        "max_result_bytes. Needs the extra tokenloom[mcp].",
    ] = None
    batch_dir: Annotated[
        Annotated[Path | None, Meta(extra={"directory": True})],
        "Directory for the files and results of /v1/files and /v1/batches, used by this gateway alone; without it the "
        "routes are not served.",
    ] = None
    max_file_bytes: Annotated[Count, "Largest file of /v1/files."] = 256 << 20
    tenant_file_bytes: Annotated[Count, "Bytes of the files that one tenant may store, results included."] = 4 << 30
    tenant_files: Annotated[Count, "Files that one tenant may store."] = 1000
    max_batch_lines: Annotated[Count, "Requests of one batch."] = 50_000
    batch_concurrency: Annotated[
        Count, "Lines of all batches that are answered at the same time, while no other request needs the capacity."
    ] = 16
    max_connections: Annotated[
        Count,
        "Connections of clients over HTTP, and as many over gRPC; fewer if the limit of open descriptors is too low.",
    ] = 16384
    max_connections_per_peer: Annotated[
        Count, "HTTP connections from one address; connections through a unix socket have none."
    ] = 4096
    max_grpc_calls: Annotated[
        Count, "gRPC calls of clients that are open at the same time; further ones end in RESOURCE_EXHAUSTED."
    ] = 4096
    max_kept_prompt_bytes: Annotated[
        Count,
        "Bytes of prompts kept while their requests run; a prompt beyond them is not kept, and its request ends with a "
        "retryable error if its output processor is lost.",
    ] = 1 << 30
    journal_copies: Annotated[
        Annotated[int, Meta(ge=1, le=2)],
        "Output processors that have a request which its client can resume, with its tokens so far: 1: the one that "
        "runs it; 2: a second one too, on another host if there is one, so that the client can resume after this "
        "gateway and the first one are lost together. Give all gateways of a mesh the same.",
    ] = 1
    max_queue_seconds: Annotated[
        Annotated[float, Meta(gt=0)],
        "Seconds that a request may wait for its first token, by the estimate at its arrival; a request that would "
        "wait longer is refused with status 503 and a Retry-After. A request of a less urgent priority may wait less.",
    ] = DEFAULT_QUEUE_SECONDS
    ready_without_engines: Annotated[
        bool,
        "Be ready and healthy while no engine serves, as where an autoscaler scales engines to zero: requests wait for "
        "one as long as they may take, and /metrics counts them (tokenloom_gateway_held_requests). By default a "
        "gateway becomes ready with the first engine.",
    ] = False
    beside_engine: Annotated[
        str,
        "Name of the engine that this gateway stands for, for an endpoint picker that chooses among engines: requests "
        "are placed there while it serves and has room, and /metrics shows its load, not that of all engines, under "
        "vLLM's names. Empty: it stands for all.",
    ] = ""
    always_queued: Annotated[
        Annotated[int, Meta(ge=0)],
        "Outputs that may wait for their first token whatever the estimate says, because it is unreliable for few.",
    ] = ALWAYS_QUEUED
    max_live_requests: Annotated[
        Count,
        "Outputs in work at the same time, a bound of the gateway's memory: --max-queue-seconds limits requests first.",
    ] = 16384
    max_request_values: Annotated[
        Count,
        "Largest n * max_tokens * (1 + logprobs) of a request, for all its prompts; without max_tokens, the default is "
        "lowered to fit.",
    ] = DEFAULT_MAX_VALUES
    tenant_live_outputs: Annotated[
        Count | None,
        "Outputs (prompts times n) of one tenant in work. Default with several tenants: half of --max-live-requests.",
    ] = None
    tenant_tokens_per_second: Annotated[
        Annotated[float, Meta(gt=0)] | None, "Prompt and output tokens of one tenant per second; by default any number."
    ] = None
    tenant_token_burst: Annotated[
        Count | None, "Tokens that a tenant may use at once after it was idle; by default those of 60 s."
    ] = None
    tenant_sessions: Annotated[
        Count | None,
        "Sessions and streams of the Open Inference Protocol that one tenant may have open; by default 256 where "
        "several share the gateway.",
    ] = None
    tenant_pending_grammars: Annotated[
        Count | None,
        "Different grammars of one tenant that wait for their first token. Default with several tenants: 32.",
    ] = None
    tenant_body_bytes: Annotated[
        Count | None,
        "Bytes of one tenant's request bodies that the gateway holds. Default with several tenants: half of its limit.",
    ] = None
    most_urgent_priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)], "Lowest (most urgent) priority value that a client can get."
    ] = 0
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        "Seconds that a request may take; also the time that a session, or a stream of the Open Inference Protocol, "
        "may wait for its next request.",
    ] = 600.0

    hold_connections: Annotated[
        Annotated[Path | None, Meta(extra={"directory": True})],
        "Directory in which the gateways of this machine meet, so that one continues on the same connections the HTTP "
        "answers of another one that is killed: a process beside each gateway keeps its connections. Linux; not with "
        "--public-tls-cert. By default the answers of a killed gateway end with it.",
    ] = None
    keep_disconnected_requests: Annotated[
        Annotated[float, Meta(ge=0, le=3600)],
        "Seconds for which a request that its client can resume runs on after the client's connection has ended; 0: it "
        "is cancelled at once, as every other request is.",
    ] = DEFAULT_UNATTENDED_SECONDS
    stream_head_after: Annotated[
        Annotated[float, Meta(ge=0.0, le=3600.0)],
        "Seconds without output after which a streamed answer over HTTP begins: its head is sent, and from then on "
        "every 10 s of silence something that clients skip. Errors before that keep their status. 0: answers begin "
        "with their first output.",
    ] = 5.0
    drain: Annotated[
        Literal["finish", "migrate"],
        "What happens to live requests after a stop signal: finish lets them end within --drain-timeout, then ends the "
        "resumable ones so that their clients continue them through another gateway; migrate does this at once.",
    ] = "finish"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_named(self.plugins, tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser)
        check_named(self.plugins, authentication=self.authentication)
        for name in self.fronts:
            check_named(self.plugins, fronts=name)
        if self.internal_listen and self.certificate is None:
            raise ValueError("--internal-listen needs --tls-ca, --tls-cert and --tls-key: its clients are peers")
        if self.journal_copies > 1 and len(self.output_processors) == 1:
            (only,) = self.output_processors
            if not only.startswith(DNS):
                raise ValueError(
                    "--journal-copies 2 needs two output processors (tokenloom serve --output-processors 2): there is "
                    f"only {only}"
                )
        if self.meshes is not None and not self.served_model_name:
            raise ValueError("--meshes needs --served-model-name: requests name the model")
        if self.page_kills is not None and not (self.page and parse(self.http_listen).is_local):
            raise ValueError(
                "--page-kills needs --page, and --http-listen with a loopback address such as 127.0.0.1:8000"
            )
        if self.meshes is not None and self.beside_engine:
            raise ValueError("--beside-engine cannot be combined with --meshes: an engine has one model")
        if self.hold_connections is not None and self.public_tls_cert is not None:
            raise ValueError(
                "--hold-connections cannot be combined with --public-tls-cert: only the process that has made an "
                "encrypted connection can continue it; let TLS end in `tokenloom relay`, or in a proxy"
            )
        if self.hold_connections is not None and parse(self.http_listen).path:
            raise ValueError("--hold-connections needs an --http-listen of TCP, such as 127.0.0.1:8000")
        if self.max_audio_bytes_in_flight < self.max_audio_bytes:
            raise ValueError("--max-audio-bytes-in-flight must be at least --max-audio-bytes")
        if (self.operator_tls_cert is None) != (self.operator_tls_key is None):
            raise ValueError("--operator-tls-cert and --operator-tls-key must be set together")
        if self.has_admin and self.certificate is not None and self.operator_certificate is None:
            raise ValueError("admin routes of a mesh with certificates need --operator-tls-cert and --operator-tls-key")

    @property
    def is_public(self) -> bool:
        return True

    @property
    def held_listener(self) -> int | None:
        return self.listen_fd

    @property
    def tenant_limits(self) -> TenantLimits:
        """The options for tenants without limits of their own."""
        return TenantLimits(
            tokens_per_second=self.tenant_tokens_per_second,
            token_burst=self.tenant_token_burst,
            live_outputs=self.tenant_live_outputs,
            sessions=self.tenant_sessions,
            pending_grammars=self.tenant_pending_grammars,
            body_bytes=self.tenant_body_bytes,
        )

    @property
    def is_open(self) -> bool:
        """API keys keep strangers out, wherever TLS ends."""
        return self.insecure or bool(self.api_key) or self.api_key_file is not None

    @property
    def grpc_limits(self) -> GrpcLimits:
        """The limits of clients."""
        connections = for_clients(self.max_connections, NUM_EDGES)
        # A client's machine may be starved, or its network away, for seconds: a stream cut off then is one that a plain
        # client does not get back, while one kept for a client that left takes a queue's room for 22 s.
        return GrpcLimits(connections, streams=MAX_STREAMS, calls=self.max_grpc_calls, is_patient=True)

    @property
    def has_admin(self) -> bool:
        """Whether the admin routes are served."""
        return bool(self.admin_api_key) or self.admin_api_key_file is not None

    @property
    def operator_certificate(self) -> CertificateFiles | None:
        """What the admin routes present to engines; None: the mesh has no certificates."""
        if self.tls_ca is None or self.operator_tls_cert is None or self.operator_tls_key is None:
            return None
        return CertificateFiles(self.tls_ca, self.operator_tls_cert, self.operator_tls_key, "operator_tls_cert")
