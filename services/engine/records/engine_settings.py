"""Options of an engine: those of its front, and the whole configuration of its core."""

import re
from collections.abc import Collection
from functools import reduce
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from tokenloom.engine_core.data.config import (
    EngineConfig,
    LoraConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputConfig,
    TLSFiles,
    WorkerConfig,
)
from tokenloom.model_files.model_path import DEMO_MODEL_NAME, expanded, resolve
from tokenloom.process import hides_gpus
from tokenloom.process.plugins import check_named
from tokenloom.request.chat_template import check_chat_template, names_plugin, read_chat_template
from tokenloom.request.errors import NotFound, Unavailable
from tokenloom.request.sampling_params import DEFAULT_MAX_LOGPROBS
from tokenloom.services.runtime.host.options import build, flag, gpu_defaults, options_of
from tokenloom.services.runtime.host.service_settings import Count, OptionalAddress, ServiceSettings
from tokenloom.services.runtime.peers.certificate_files import dns_name

DrainMode: TypeAlias = Literal["finish", "migrate"]


class KVEventsConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the events of the prefix cache are published for routers of others. Users write it as JSON (names as in vLLM,
    except for the last three)."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    """Bound by the engine; port 0: any, which its log and its state file name. A rank adds its number to the port."""
    replay_endpoint: str | None = None
    """Where steps that a subscriber missed are asked for; None: nowhere."""
    buffer_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Steps that are kept for that."""
    hwm: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Messages that wait for a slow subscriber; more are lost to it."""
    topic: Annotated[str, Meta(max_length=256)] = ""
    token_ids: bool = False
    """Whether the events hold what is cached: their readers see the prompts."""
    curve_key_file: str = ""
    """CURVE key of the engine, as ``zmq.auth.create_certificates`` writes secret ones; empty: no encryption."""
    curve_clients: str = ""
    """Folder with the public keys of the subscribers that may connect."""

    def __post_init__(self) -> None:
        if bool(self.curve_key_file) != bool(self.curve_clients):
            raise ValueError("curve_key_file and curve_clients must be set together")
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                _check_endpoint(name, value, is_encrypted=bool(self.curve_key_file))

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


_REMOTE_OPTIONS = frozenset(
    (
        *("model", "max_num_seqs", "max_model_len"),
        "worker",  # beside hash workers, engines have no fingerprint of weights
        # `tokenloom serve` sets them for every engine.
        *("num_threads", "cpus", "engines_on_host", "place_on_host", "warm_up_dir"),
    )
)
"""Options of a core that an engine may have for which a server of others computes."""


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_right = parts.port != 0 and parts.scheme in ("http", "https") and parts.hostname and not parts.query
    except ValueError:  # of a port that is no number
        is_right = False
    if value and not (is_right and parts.username is None):
        raise ValueError(f"must be http://host:port or https://host:port, not {value!r:.80}")
    return value


def _check_endpoint(name: str, value: str, *, is_encrypted: bool) -> None:
    """Raise ``ValueError`` for what is no address to bind, and for one that others reach without encryption."""
    scheme, _, place = value.partition("://")
    if scheme == "ipc" and place.startswith("/"):
        return
    host, colon, port = place.rpartition(":")
    if scheme != "tcp" or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name} must be tcp://ADDRESS:PORT or ipc:///PATH, not {value!r:.80}")
    if not is_encrypted and host not in ("127.0.0.1", "[::1]", "localhost"):
        reason = "other machines could read the events there, which say what is cached"
        raise ValueError(f"{name} {value!r:.80}: {reason}; use 127.0.0.1, or set curve_key_file and curve_clients")


class EngineSettings(ServiceSettings, frozen=True, kw_only=True):
    """The engine's place in the mesh, what its front accepts, and in ``engine`` all options of the core."""

    service: ClassVar[str] = "engine"

    served_model_name: Annotated[str, "Name that clients use; by default the last part of the directory."] = ""
    chat_template: Annotated[
        Annotated[str, Meta(extra={"check": check_chat_template})],
        "Chat template to use instead of the checkpoint's: a file, or Jinja in one line. All tokenizers and engines "
        "of a mesh need the same.",
    ] = ""
    coordinator: Annotated[OptionalAddress, "Address of the coordinator; empty: none."] = ""
    advertise_address: Annotated[
        OptionalAddress, "Address under which peers reach this engine; by default --listen."
    ] = ""
    kv_listen: Annotated[
        OptionalAddress, "Address where engines ask for KV blocks: host:port or unix:/path; empty: off."
    ] = "127.0.0.1:0"
    kv_advertise_address: Annotated[
        OptionalAddress, "Address under which engines reach that one; by default --kv-listen."
    ] = ""
    enable_prompt_embeds: Annotated[bool, "Accept embeddings in place of the tokens of a prompt."] = False
    kv_events_config: Annotated[
        KVEventsConfig | None,
        "Publish the events of the prefix cache over ZeroMQ as vLLM does, for routers of others: a JSON object with "
        "enable_kv_cache_events and, where the defaults do not suit, endpoint, replay_endpoint, buffer_steps, hwm, "
        "topic, token_ids, curve_key_file and curve_clients (docs/operate/kv-events.md). Sets --kv-events too.",
    ] = None
    max_logprobs: Annotated[
        Annotated[int, Meta(ge=-1)],
        "Most log probabilities that a request can get for a token; -1: the whole vocabulary.",
    ] = DEFAULT_MAX_LOGPROBS
    drain: Annotated[
        DrainMode,
        "What happens to live requests after a stop signal: finish lets them end within --drain-timeout, then moves "
        "the rest to other instances; migrate moves all of them at once, with their KV if --kv-transports is set.",
    ] = "finish"
    move_before_preemption: Annotated[
        bool,
        "Before the KV blocks run out, let the request that would be preempted first go on with its KV at an engine "
        "that has room. One that has not left in time is preempted and computed again. Needs --kv-transports.",
    ] = False
    verify: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        "Share of the requests that output processors let another engine compute again, their --verify. With more than "
        "0 this engine ends when they find its tokens wrong.",
    ] = 0.0
    max_waiting: Annotated[
        Count,
        "Requests that may wait in addition to those in the batch, a bound of the engine's memory: the gateways' "
        "--max-queue-seconds limits requests first.",
    ] = 16384
    frame_interval: Annotated[
        Annotated[float, Meta(ge=0, le=0.1)],
        "Seconds between frames to an output processor, except for first tokens and ends, so that "
        "short steps share a frame; half of it for fewer than 16 requests; 0: one frame for each step.",
    ] = 0.008
    staged_weights_dir: Annotated[
        str,
        "Folder that keeps the weights that trainers send (EngineAdmin.StageWeights), such as /dev/shm/NAME, which is "
        "memory; empty: none are taken. It needs room for three copies of the weights.",
    ] = ""
    disable_log_stats: Annotated[bool, "Log no lines of throughput, queues and caches."] = False
    log_stats_interval: Annotated[
        Annotated[float, Meta(gt=0, le=86400)],
        "Seconds from one such line to the next; of several idle intervals only the first has one.",
    ] = 10.0
    remote_vllm: Annotated[
        Annotated[str, Meta(extra={"check": _check_url})],
        "Address, http(s)://host:port, of a vllm serve with --enable-scale-out, which computes in place of a core of "
        "this engine; --model names the same checkpoint (docs/use/tokens.md). Empty: none.",
    ] = ""
    remote_vllm_key_file: Annotated[
        Path | None, "File with the API key of that server, if it asks for one; with --remote-vllm."
    ] = None
    engine: EngineConfig = EngineConfig(
        worker=WorkerConfig(model=DEMO_MODEL_NAME),
        # Clients of a service wait for their next token, which a long prompt in the same step would delay.
        scheduler=SchedulerConfig(prefill_tokens_beside_decode=128),
        structured_output=StructuredOutputConfig(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine.check_plugins(self.plugins)
        self.engine.kv.check_store(enable_prefix_caching=self.engine.cache.enable_prefix_caching)
        if names_plugin(self.chat_template):
            check_named(self.plugins, chat_template=self.chat_template)
        self._check_remote()
        if self.engine.kv.role == "prefill" and not self.kv_listen:
            raise ValueError("--kv-listen: other engines continue what a prefill engine begins; give it an address")
        if self.move_before_preemption and not (self.kv_listen and self.kv_transports):
            missing = "--kv-listen" if self.kv_transports else "--kv-transports"
            reason = f"requests move between engines that exchange KV; set {missing}"
            raise ValueError(f"--move-before-preemption: {reason}")
        if self.staged_weights_dir and self.engine.worker.load_format != "auto":
            wanted = "tensors replace those of safetensors files only; leave out --load-format"
            raise ValueError(f"--staged-weights-dir: load_format is {self.engine.worker.load_format}, but {wanted}")
        if self.kv_events_config is None or not self.kv_events_config.is_on:
            return
        if not self.engine.cache.enable_prefix_caching:
            raise ValueError("--kv-events-config: without --enable-prefix-caching there are no events to publish")
        force_setattr(self, "engine", replace(self.engine, cache=replace(self.engine.cache, kv_events=True)))

    def _check_remote(self) -> None:
        """Raise ``ValueError``, naming the options, for those of a core where a server of others computes."""
        if not self.remote_vllm:
            if self.remote_vllm_key_file is not None:
                raise ValueError("--remote-vllm-key-file is of no use without --remote-vllm")
            return
        front = ("enable_prompt_embeds", "kv_events_config", "move_before_preemption", "plugins", "staged_weights_dir")
        given = [
            flag(name)
            for name, option in options_of(type(self)).items()
            if (option.path[0] == "engine" or name in front)
            and name not in _REMOTE_OPTIONS
            and reduce(getattr, option.path, self) != option.default
        ]
        if given:
            raise ValueError(f"--remote-vllm: vLLM computes, with options of its own; leave out {', '.join(given)}")

    def for_machine(self, given: Collection[str]) -> Self:
        # What vLLM computes has limits of its own.
        return self if self.remote_vllm else replace(self, engine=with_gpu_defaults(self.engine, given))

    @property
    def kv_transports(self) -> tuple[str, ...]:
        """Ways to read KV blocks of another engine, with the default of the role; empty: blocks do not move."""
        # An engine of role `both` moves KV only when its settings say so: a pool that engines share cannot lie in
        # huge pages on most kernels.
        return self.engine.kv.transports or (() if self.engine.kv.role == "both" else ("auto",))

    def engine_config(self, checkpoint: str) -> EngineConfig:
        """Return the configuration of the core for the checkpoint in this directory."""
        kv = replace(self.engine.kv, transports=self.kv_transports)
        if (files := self.certificate) is not None:
            tls = TLSFiles(str(files.ca), str(files.cert), str(files.key), dns_name(self.service))
            kv = replace(kv, socket_tls=tls)
        template = read_chat_template(self.chat_template, self.plugins) if self.chat_template else None
        observability = replace(self.engine.observability, trace_steps=bool(self.otlp_endpoint), bill=self.bill)
        config = replace(self.engine, kv=kv, observability=observability, plugins=self.plugins)
        return for_checkpoint(config, checkpoint, template)


def for_checkpoint(config: EngineConfig, checkpoint: str, chat_template: str | None = None) -> EngineConfig:
    """Return the configuration with what it takes from the checkpoint in this directory; empty: no model.

    ``chat_template``: its source, if it is not the checkpoint's own.

    Raises ``ValueError`` if an option does not fit the checkpoint.
    """
    worker = replace(config.worker, model=checkpoint)
    config = replace(config, lora=_with_absolute_paths(config.lora), scheduler=_for_device(config))
    config = replace(config, speculative=with_draft_path(config.speculative, Path(checkpoint)))
    if not checkpoint:
        return replace(config, worker=worker, structured_output=None)
    # Imported here because it takes protobuf, and the help of a command needs only the options.
    from .grammar_config import reasoning_config, structured_output_config

    path = Path(checkpoint)
    grammars = structured_output_config(path, config.structured_output)
    if grammars is not None:
        grammars = replace(grammars, plugins=config.plugins)
    reasoning = reasoning_config(path, config.reasoning, chat_template, config.plugins)
    return replace(config, worker=worker, structured_output=grammars, reasoning=reasoning)


def _with_absolute_paths(lora: LoraConfig) -> LoraConfig:
    """Return the configuration with paths that other processes understand too. Raises ``ValueError`` naming an option
    that does not work."""
    modules = tuple(f"{name}={expanded(path).absolute()}" for name, path in lora.named_paths())
    return replace(lora, modules=modules)


def with_draft_path(speculative: SpeculativeConfig | None, checkpoint: Path) -> SpeculativeConfig | None:
    """Return the configuration with the directory of its model: a folder of the checkpoint, such as ``draft`` of the
    demo model, or any other. Raises ``ValueError`` if it does not exist."""
    if speculative is None or not speculative.model:
        return speculative
    if (own := checkpoint / speculative.model / "config.json").is_file():
        return replace(speculative, model=str(own.parent))
    try:
        return replace(speculative, model=str(resolve(speculative.model)))
    except (NotFound, Unavailable) as error:
        raise ValueError(f"speculative_config: {error}") from None


def _for_device(config: EngineConfig) -> SchedulerConfig:
    """Return the limits of a step with the default that depends on the device: a step is scheduled while one computes
    where a GPU does the computing, since on a CPU both take the same cores."""
    scheduler = config.scheduler
    if scheduler.async_scheduling is not None:
        return scheduler
    overlaps = _computes_on_gpu(config)
    return replace(scheduler, async_scheduling=overlaps, overlaps_by_default=overlaps)


def with_gpu_defaults(config: EngineConfig, given: Collection[str]) -> EngineConfig:
    """Return the configuration with larger steps where a GPU computes the model, unless options are ``given``."""
    if not _computes_on_gpu(config):
        return config
    larger = gpu_defaults(config, given)
    # A small token budget that is given still has to hold a token of each request, and a chunk of states beside them.
    tokens = larger.get("max_num_batched_tokens", config.scheduler.max_num_batched_tokens)
    if tokens < _TOKENS_OF_A_SEAT * larger.get("max_num_seqs", 0):
        del larger["max_num_seqs"]
    return build(config, larger)


_TOKENS_OF_A_SEAT = 8


def _computes_on_gpu(config: EngineConfig) -> bool:
    worker = config.worker
    has_gpu = worker.device == "cuda" or (worker.device == "auto" and may_find_gpu(config))
    return worker.worker == "model" and has_gpu


def may_find_gpu(config: EngineConfig) -> bool:
    """Return whether the workers of an engine may find a GPU, here or on the machines of a Ray cluster."""
    # The machine that is asked for places in the cluster need have none. There auto is refused unless a node has one.
    is_on_ray = "ray" in (config.parallel.data_parallel_backend, config.parallel.distributed_executor_backend)
    return (is_on_ray and config.worker.device in ("auto", "cuda")) or may_have_gpu()


_GPU_NODES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
"""What the drivers of NVIDIA, of WSL and of AMD make for GPUs."""


def may_have_gpu() -> bool:
    """Return whether the installed torch computes on GPUs, and this machine has one that the environment does not hide;
    neither is started for that."""
    # Asking the driver, as torch does, would make CUDA unusable in the parts that are forked from this process.
    torch = find_spec("torch")
    if torch is None or torch.origin is None or not any(map(glob, _GPU_NODES)):
        return False
    if hides_gpus():
        return False
    version = (Path(torch.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^(cuda|hip)\b[^=]*= *['\"]", version, re.MULTILINE) is not None
