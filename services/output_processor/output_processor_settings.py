"""Options of an output processor."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.service_settings import Address, ServiceSettings

Drain: TypeAlias = Literal["finish", "migrate"]


class OutputProcessorSettings(ServiceSettings, frozen=True, kw_only=True):
    """Which model's tokens to decode, and where the coordinator is."""

    service: ClassVar[str] = "output_processor"

    model: Annotated[str, "Checkpoint directory, GGUF file or hub id to read the tokenizer from."] = DEMO_MODEL_NAME
    served_model_name: Annotated[str, "Name that clients use; by default the last part of the directory."] = ""
    coordinator: Annotated[Address, "Address of the coordinator: host:port or unix:/path."]
    max_requests: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)],
        "Live requests, a bound of memory: the gateways' --max-queue-seconds limits requests first.",
    ] = 32768
    max_prompt_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Memory for the prompts of live requests, in bytes: 8 for each token, and 4 more for each further sample. "
        "Beyond it, requests are sent to other output processors or refused. 0: half of the memory limit of the "
        "container, or 1 GiB if there is none.",
    ] = 0
    keep_lost_requests: Annotated[
        Annotated[float, Meta(ge=0, le=3600)],
        "Seconds for which a request that can be resumed is kept after the loss of its gateway, and after its end or "
        "the last call that resumes it then.",
    ] = 60.0
    max_kept_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Memory for requests that have ended and can be resumed, in bytes; beyond it the oldest are forgotten.",
    ] = 64 << 20
    max_copied_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Memory for copies of requests that other output processors run (--journal-copies of gateways), in bytes; "
        "beyond it the newest ones of the tenant with most are dropped. 0: none are kept.",
    ] = 64 << 20
    drain: Annotated[
        Drain,
        "What happens to live requests after a stop signal: finish lets them end within --drain-timeout, then moves "
        "the rest to other output processors; migrate moves all of them at once.",
    ] = "finish"
    engine_subset: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)],
        "Engines of each role that this output processor works with when there are more: the coordinator shares them "
        "out evenly. Another engine is used when none of these can take a request, or only that one has room at once.",
    ] = 128
    engine_hang_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=3600)],
        "Seconds without a step after which an engine that has work counts as dead.",
    ] = 60.0
    request_record_dir: Annotated[
        Annotated[Path | None, Meta(extra={"directory": True})],
        "Directory for a record of each request that ends: the ids of its prompt and its outputs, its parameters, and "
        "where it was computed, from which `tokenloom replay` computes it again. Output processors of a host may share "
        "it. Without it nothing is recorded.",
    ] = None
    request_record_days: Annotated[
        Annotated[int, Meta(ge=1, le=3650)], "Days after which the files of records are removed."
    ] = 7
    request_record_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)], "Bytes of all files of records; beyond them the oldest are removed."
    ] = 1 << 30
    verify: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        "Share of the requests that end, for example 0.01, that another engine computes again while it has time to "
        "spare, in float32 or with --batch-invariant. An engine whose tokens are found wrong ends. 0: none are.",
    ] = 0.0
    request_record_text: Annotated[bool, "Record the texts of prompts and outputs beside their ids."] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.request_record_text and self.request_record_dir is None:
            raise ValueError("--request-record-text needs --request-record-dir, which says where records are kept")
