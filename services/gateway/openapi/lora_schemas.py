"""Bodies and answers of the operators' routes for LoRA adapters."""

from typing import Annotated

import msgspec
from msgspec import Meta


class AdapterBody(msgspec.Struct):
    """Names an adapter."""

    lora_name: Annotated[str, Meta(description="The adapter's own name, without the model's.")]
    base_model_name: Annotated[
        str | None, Meta(description="The model that it adapts; needed if the gateway serves several models.")
    ] = None


class LoadAdapter(AdapterBody, kw_only=True):
    """Names an adapter to load on every engine."""

    lora_path: Annotated[str, Meta(description="Directory on the engines' hosts, in the layout of the peft library.")]
    load_inplace: Annotated[bool, Meta(description="Replace another adapter of this name.")] = False


class PinAdapter(AdapterBody):
    """Names an adapter to keep on every engine's device."""

    pinned: Annotated[bool, Meta(description="False ends the pinning.")] = True


class EngineAdapter(msgspec.Struct):
    """What an engine has of an adapter."""

    in_slot: Annotated[bool, Meta(description="Whether it is on the device.")]
    requests: Annotated[int, Meta(description="Requests that wait or run with it.")]
    rank: Annotated[int, Meta(description="Rank of its matrices.")]


class LoadedAdapter(msgspec.Struct):
    """An adapter that requests can name."""

    id: Annotated[str, Meta(description="Its name for requests: model:adapter.")]
    lora_name: Annotated[str, Meta(description="Its own name.")]
    pinned: Annotated[bool, Meta(description="Whether it stays on the device without requests.")]
    digest: Annotated[str, Meta(description="SHA-256 over its files.")]
    engines: Annotated[dict[str, EngineAdapter], Meta(description="The engines that have it, by name.")]


class LoadedAdapters(msgspec.Struct):
    """The adapters of all models."""

    adapters: list[LoadedAdapter]
