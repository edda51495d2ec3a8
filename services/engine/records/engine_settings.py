"""Options of an engine: those of its front, and the whole configuration of its core, whose grammars and reasoning are
completed with what a checkpoint says."""

import hashlib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta
from msgspec.structs import replace

from tokenloom.engine_core.data.config import (
    EngineConfig,
    LoraConfig,
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputConfig,
    TLSFiles,
    WorkerConfig,
)
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_file
from tokenloom.model_files.model_path import DEMO_MODEL_NAME, expanded, resolve
from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.chat_template import check_chat_template, read_chat_template
from tokenloom.request.errors import NotFound
from tokenloom.request.reasoning import ReasoningFormat, ReasoningMarks, format_of_template, marks_of, reasoning_format
from tokenloom.request.sampling_params import DEFAULT_MAX_LOGPROBS
from tokenloom.services.runtime.host.service_settings import Count, OptionalAddress, ServiceSettings
from tokenloom.services.runtime.peers.certificate_files import dns_name
from tokenloom.v1 import types_pb2

DrainMode: TypeAlias = Literal["finish", "migrate"]


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
    max_logprobs: Annotated[
        Annotated[int, Meta(ge=-1)],
        "Most log probabilities that a request can get for a token; -1: the whole vocabulary.",
    ] = DEFAULT_MAX_LOGPROBS
    drain: Annotated[
        DrainMode,
        "What happens to live requests after a stop signal: finish lets them end within --drain-timeout, then moves "
        "the rest to other instances; migrate moves all of them at once.",
    ] = "finish"
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
    engine: EngineConfig = EngineConfig(
        worker=WorkerConfig(model=DEMO_MODEL_NAME),
        # Clients of a service wait for their next token, which a long prompt in the same step would delay.
        scheduler=SchedulerConfig(prefill_tokens_beside_decode=128),
        structured_output=StructuredOutputConfig(),
    )

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
        template = read_chat_template(self.chat_template) if self.chat_template else None
        return for_checkpoint(replace(self.engine, kv=kv), checkpoint, template)


def for_checkpoint(config: EngineConfig, checkpoint: str, chat_template: str | None = None) -> EngineConfig:
    """Return the configuration with what it takes from the checkpoint in this directory; empty: no model.

    ``chat_template``: its source, if it is not the checkpoint's own.

    Raises ``ValueError`` if an option does not fit the checkpoint.
    """
    worker = replace(config.worker, model=checkpoint)
    config = replace(config, lora=_with_absolute_paths(config.lora))
    config = replace(config, speculative=_with_path(config.speculative, Path(checkpoint)))
    if not checkpoint:
        return replace(config, worker=worker, structured_output=None)
    # Imported here because it takes protobuf, and the help of a command needs only the options.
    from .engine_settings import reasoning_config, structured_output_config

    path = Path(checkpoint)
    grammars = structured_output_config(path, config.structured_output)
    reasoning = reasoning_config(path, config.reasoning, chat_template)
    return replace(config, worker=worker, structured_output=grammars, reasoning=reasoning)


def _with_absolute_paths(lora: LoraConfig) -> LoraConfig:
    """Return the configuration with paths that other processes understand too. Raises ``ValueError`` naming an option
    that does not work."""
    modules = tuple(f"{name}={expanded(path).absolute()}" for name, path in lora.named_paths())
    return replace(lora, modules=modules)


def _with_path(speculative: SpeculativeConfig | None, checkpoint: Path) -> SpeculativeConfig | None:
    """Return the configuration with the directory of its model: a folder of the checkpoint, such as ``draft`` of the
    demo model, or any other. Raises ``ValueError`` if it does not exist."""
    if speculative is None or not speculative.model:
        return speculative
    if (own := checkpoint / speculative.model / "config.json").is_file():
        return replace(speculative, model=str(own.parent))
    try:
        return replace(speculative, model=str(resolve(speculative.model)))
    except NotFound as error:
        raise ValueError(f"speculative_config: {error}") from None


def structured_output_config(
    checkpoint: Path, chosen: StructuredOutputConfig | None = None
) -> StructuredOutputConfig | None:
    """Complete the configuration for the model in this directory or GGUF file.

    Returns None if the model has no ``tokenizer.json``, so that its outputs cannot be constrained.
    """
    file = tokenizer_file(checkpoint)
    if file is None:
        return None
    return replace(
        chosen or StructuredOutputConfig(),
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
    )


def reasoning_config(checkpoint: Path, chosen: ReasoningConfig, chat_template: str | None = None) -> ReasoningConfig:
    """Complete the configuration with the tokens that mark the reasoning of the model in this directory.

    ``chat_template``: its source, if it is not the checkpoint's own.

    Raises ``ValueError`` if the model's tokenizer cannot write the marks of a parser that was chosen by name.
    """
    template = CheckpointInfo.load(checkpoint).chat_template if chat_template is None else chat_template
    found = reasoning_format(chosen.parser, format_of_template(template))
    if found is None:
        return chosen
    if (marks := _marks(checkpoint, found)) is not None:
        return replace(chosen, marks=marks)
    problem = f"the model's tokenizer cannot write {found.start} and {found.end}"
    if chosen.parser != "auto":
        raise ValueError(f"reasoning_parser is {chosen.parser}, but {problem}; set it to none")
    OF_PROCESS.begin("no_reasoning", problem)
    return chosen


def reasoning_mode(config: ReasoningConfig, *, finds_reasoning: bool) -> types_pb2.ReasoningMode:
    """Return how an engine treats reasoning. ``finds_reasoning``: it knows the marks of the model."""
    if not finds_reasoning:
        return types_pb2.REASONING_MODE_UNSPECIFIED
    if config.enable_in_reasoning:
        return types_pb2.REASONING_MODE_CONSTRAINED
    return types_pb2.REASONING_MODE_FREE


def _marks(checkpoint: Path, found: ReasoningFormat) -> ReasoningMarks | None:
    try:
        tokenizer = load_tokenizer(checkpoint)
    except NotFound:
        return None
    marks = marks_of(found, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    # A tokenizer without the mark encodes it into unknown tokens, which any unknown text would match. So the ids are
    # decoded again and compared.
    written = [tokenizer.decode(list(mark), skip_special_tokens=False).strip() for mark in (marks.start, marks.end)]
    return marks if written == [found.start, found.end] else None
