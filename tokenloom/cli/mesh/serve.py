"""``tokenloom serve``: keeps a local mesh up."""

import asyncio
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.checkpoint import DEMO_MODEL_NAME
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier, bare, prefixed
from tokenloom.supervisor.run import run_mesh

from ..failures import reported
from .engine_choices import Device, Dtype, Quantization, SchedulingPolicy, WorkerKind
from .flags import check_engines, flags, model_directory, setting_flags
from .serve_config import as_defaults, service_flags


class LogFormat(StrEnum):
    """Lines for people, with the part's name before each, or for machines."""

    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe lines to show."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or Hugging Face hub id.")] = DEMO_MODEL_NAME,
    config: Annotated[
        Path | None,
        typer.Option(callback=as_defaults, is_eager=True, help="File with these options: .toml, .json or .yaml."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=64, help="Engines, 1 by default; the cores are divided among them.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, max=64, help="Engines that compute prompts, with --decode, without --engines.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, max=64, help="Engines that generate, from KV blocks of the prefill engines.")
    ] = None,
    pd_threshold: Annotated[
        int | None, typer.Option(min=0, help="Prompts with fewer uncached tokens stay on one engine; 0: none does.")
    ] = None,
    kv_transports: Annotated[
        str, typer.Option(help="How KV blocks get from prefill to decode, best first: auto, shm, nixl, socket.")
    ] = "auto",
    kv_checksum: Annotated[bool, typer.Option(help="Compare a checksum of every KV block that moved.")] = False,
    tokenizers: Annotated[int, typer.Option(min=1, max=64, help="Tokenizer services.")] = 1,
    output_processors: Annotated[int, typer.Option(min=1, max=64, help="Output processors.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateways, on ports that follow each other.")] = 1,
    host: Annotated[str, typer.Option(help="Address that the gateways listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Public gRPC port; by default 1000 above --port.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; by default the directory's last part.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What engines compute on; auto: a GPU if there is one.")] = Device.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and activations.")] = Dtype.AUTO,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Round the layers' weights to int8 at load.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Prompt and output together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests in an engine's batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of an engine's step.")] = None,
    scheduling_policy: Annotated[
        SchedulingPolicy, typer.Option(help="Who goes first: who came first, or requests of the lowest priority.")
    ] = SchedulingPolicy.FCFS,
    most_urgent_priority: Annotated[
        int | None, typer.Option(help="Lowest (most urgent) priority that a client gets, whatever it asks for.")
    ] = None,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option("--kv-cache-memory", "--kv-cache-memory-bytes", min=1, help="Bytes of an engine's KV cache."),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(min=1, help="Blocks of an engine's KV cache, whatever the device.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block.")] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse equal prefixes' KV."),
    ] = None,
    max_logprobs: Annotated[
        int | None, typer.Option(min=-1, help="Most log probabilities for a token; -1: no limit.")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(min=0, help="Tokens of one prompt in a step, at most; 0: no limit.")
    ] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Schedule the next step while one runs.")] = False,
    enable_prompt_embeds: Annotated[bool, typer.Option(help="Take embeddings in the place of prompt tokens.")] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes tool calls: auto, none, hermes, llama3_json, mistral.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model writes reasoning: auto, none, deepseek_r1, qwen3.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TOKENLOOM_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with SHA-256 hashes of keys, one a line.")] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TOKENLOOM_ADMIN_API_KEY", show_envvar=True, help="Key of the admin routes; none: no routes."
        ),
    ] = None,
    cors_origins: Annotated[
        str | None, typer.Option(help="Origins of web pages that may call from a browser, comma-separated; *: all.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain to show clients, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    strict: Annotated[bool, typer.Option(help="Refuse unknown fields in requests instead of ignoring them.")] = False,
    insecure: Annotated[bool, typer.Option(help="Allow a --host that other machines can reach.")] = False,
    worker: Annotated[
        WorkerKind, typer.Option(help="What computes: the model; a hash, for tests; nothing, for benchmarks.")
    ] = WorkerKind.CPU,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that work may go on after Ctrl-C.")] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines to show.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="Lines for people or for machines.")] = LogFormat.HUMAN,
) -> None:
    """Serve MODEL (the demo model without one) on this machine until Ctrl-C; a second Ctrl-C kills."""
    check_engines(engines, prefill, decode)
    path, name = model_directory(model, served_model_name)
    in_file = service_flags(config)
    options = MeshOptions(
        model=path,
        served_model_name=name,
        engines=engines or 1,
        prefill=prefill or 0,
        decode=decode or 0,
        kv_transports=kv_transports,
        tokenizers=tokenizers,
        output_processors=output_processors,
        gateways=gateways,
        host=host,
        port=port,
        grpc_port=grpc_port,
        drain_timeout=drain_timeout,
        common_flags=flags(log_level=log_level, log_format=log_format),
        flags={
            **in_file,
            "coordinator": in_file["coordinator"] + flags(pd_threshold=pd_threshold),
            "engine": in_file["engine"]
            + setting_flags({} if enable_prefix_caching is None else {"enable_prefix_caching": enable_prefix_caching})
            + flags(
                device=device,
                dtype=dtype,
                quantization=quantization,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                scheduling_policy=scheduling_policy,
                kv_cache_memory=kv_cache_memory,
                num_kv_blocks=num_gpu_blocks_override,
                block_size=block_size,
                max_logprobs=max_logprobs,
                long_prefill_token_threshold=long_prefill_token_threshold,
                async_scheduling=async_scheduling,
                kv_checksum=kv_checksum,
                enable_prompt_embeds=enable_prompt_embeds,
                worker=worker,
            ),
            "gateway": in_file["gateway"]
            + flags(
                most_urgent_priority=most_urgent_priority,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                api_key_file=api_key_file,
                cors_origins=cors_origins,
                strict=strict,
                insecure=insecure,
                public_tls_cert=tls_cert,
                public_tls_key=tls_key,
                health_listen=None if tls_cert is None else "127.0.0.1:0",
            ),
        },
        # Not a flag: everyone on the machine can read those.
        environment={"gateway": _keys(TOKENLOOM_API_KEY=api_key, TOKENLOOM_ADMIN_API_KEY=admin_api_key)},
    )
    write_line = bare(sys.stderr) if log_format is LogFormat.JSON else prefixed(sys.stderr)
    scheme = "http" if tls_cert is None else "https"
    with reported():
        outcome = asyncio.run(
            run_mesh(options, LineCopier(write_line), lambda mesh: _announce_and_wait(mesh, name, scheme))
        )
    raise typer.Exit(0 if outcome.clean else 1)


def _keys(**keys: str | None) -> dict[str, str]:
    return {name: key for name, key in keys.items() if key is not None}


async def _announce_and_wait(mesh: Mesh, name: str, scheme: str) -> None:
    await mesh.wait_serving()
    for gateway in mesh.gateways:
        print(f"{name} is served at {scheme}://{gateway.http} (gRPC: {gateway.address}). Ctrl-C stops it.", flush=True)
    await mesh.wait_failed()
