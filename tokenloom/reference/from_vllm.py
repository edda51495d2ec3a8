"""Writes the page for users of vLLM: every flag, request field and metric, and what Tokenloom has in its place.

The names at the end are those that both have, and metrics of vLLM that have another name here.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence

from tokenloom.services.gateway.records.compat import EXCLUSIONS, FOREIGN_APIS
from tokenloom.services.runtime.host.foreign_flags import foreign_flags

_HEAD = """# From vLLM

`make docs` writes the tables of this page from the code, and tests try what they say.

Replace `vllm serve MODEL` by `tokenloom serve MODEL`. The OpenAI API, vLLM's additional request fields, the sampling
parameters, the methods of the offline `LLM` class and the names of the metrics stay. An unknown flag is an error; for
a flag of vLLM in the table below, the error says what to use instead. A request field without effect is named in the
response header `x-tokenloom-ignored`.

| | vLLM | Tokenloom |
|---|---|---|
| start a server | `vllm serve MODEL --port 8000` | `tokenloom serve MODEL --port 8000` |
| several engines | `--data-parallel-size 4` | `--data-parallel-size 4`, or `--engines 4` |
| prefill and decode on two engines | two servers with `--kv-transfer-config`, and a proxy | `--prefill 1 --decode 1` |
| chat on the command line | `vllm chat` | `tokenloom chat` |
| a batch file | `vllm run-batch -i IN -o OUT --model MODEL` | `tokenloom run-batch -i IN -o OUT --model MODEL` |
| measure a server | `vllm bench serve` | `tokenloom bench serve` |
| in Python | `from vllm import LLM, SamplingParams` | `from tokenloom import LLM, SamplingParams` |
| an engine in a program | `LLMEngine`, `AsyncLLM` | [the same](../use/embedding.md), with `EngineArgs` for both |
| the same bits in every batch | `VLLM_BATCH_INVARIANT=1` | `--batch-invariant`, `TOKENLOOM_BATCH_INVARIANT=1` |
| health, metrics | `/health`, `/metrics` on the server's port | the same on the gateway's port |

What differs on purpose:

- A mesh has several processes. `tokenloom ps` lists them, `tokenloom top` shows their load.
- Sampling depends on logits, parameters, seed and position only, so a request that moves to another engine continues
  with the same tokens. The tokens of a seed are not those of vLLM.
- A text for a vector is encoded as the checkpoint's files of sentence-transformers say: with `default_prompt_name`, or
  the prompt that `prompt_name` names, and cut to `max_seq_length`, where vLLM refuses it; see
  [embeddings](../use/embeddings.md).
- Of several prompts of a call of `LLM`, one that is refused or fails (too long, an invalid grammar, embeddings with
  NaN) has an output with an `error`, and the others have theirs; vLLM raises for the whole call. If no prompt is left,
  or there was only one, the call raises the error.
- `LLM` computes in the caller's process, as vLLM does with `VLLM_ENABLE_V1_MULTIPROCESSING=0`. With
  `engine_process=True` the engine has a process of its own, which needs no guard around the program; if that process
  ends, calls raise `EngineDeadError`, and the program may make another `LLM`.
- A gateway without API keys serves only clients that reach it under its own name (`--allowed-hosts`).
- A request that would wait too long is refused with 503 and `Retry-After` instead of queued without bound
  ([overload](../operate/operations.md#overload)).
- The gateway logs a line for each request that has ended, without its prompt and outputs. `--no-access-log` turns this
  off.

"""

_FLAGS = """## Flags with the same name and meaning

{names}

The [configuration page](../reference/configuration.md) describes them. Backends of attention have other names: vLLM's
`FLASHINFER`, `FLASH_ATTN` and `TRITON_ATTN` are `flashinfer`, `flash-attn` and `triton` here.

## Arguments of `LLM`

`LLM` takes {arguments} with vLLM's meaning, and the other options of the engine by their names in the
[configuration page](../reference/configuration.md). Every other argument of vLLM's is accepted with the value that is
vLLM's default, which changes nothing. With another value it is a `TypeError` that answers as the table below does for
the flag of the same name. {permitted} may also be true, which asks for nothing here. `tokenizer_mode` may be `slow`:
fast tokenizers give the same tokens, and a `tokenizer.model` of SentencePiece is read where no other file is.
"""

_OTHER_FLAGS = """
## Flags that have another name, or none

Flags that few write have no row. The error names options with a similar name, if there are any.

| flag of vLLM | instead |
|---|---|
"""

_FIELDS = """## Request fields

Fields that work are described in [HTTP](../reference/http.md). *refused*: status 400, with an error that names the
field. *ignored*: the request succeeds, and the response header `x-tokenloom-ignored` names the field. A test sends each
field to a gateway and compares the outcome with this list.
"""

_EXCLUSIONS = """
## Request fields that exclude each other

Each works by itself. *refused*: together they get status 400. *gives way*: the field of the second column has no effect
beside the first, and is named in `x-tokenloom-ignored`. A test sends every pair of fields of each API.

| one of | beside one of | outcome | why |
|---|---|---|---|
"""

_METRICS = """## Metrics

These have vLLM's names, labels and meanings:

{same}

These are absent, or have another name:

| metric of vLLM | in Tokenloom |
|---|---|
"""

_OTHERS = """
## From llama.cpp or Ollama

- A GGUF file is a model: `tokenloom serve ./model-Q4_K_M.gguf`. [Models](../reference/models.md) lists the
  architectures that are read from GGUF.
- `llama-server --port 8080 -m FILE` becomes `tokenloom serve FILE --port 8080`; `-c N` becomes `--max-model-len N`, and
  `-np N` becomes `--max-num-seqs N`.
- Clients that use OpenAI's API keep working: change the base URL to `http://127.0.0.1:8000/v1`. Ollama's clients keep
  working with `OLLAMA_HOST=http://127.0.0.1:8000` ([clients](../use/clients.md#ollamas-clients)).
- Chat templates come from the file or from the checkpoint, as there.
- `ollama run` becomes `tokenloom chat`, and `ollama ps` becomes `tokenloom ps`.
"""


def from_vllm() -> str:
    """Return ``docs/start/from-vllm.md``."""
    flags = _flags_of_one_name()
    same = _listed([f"vllm:{name}" for name in SAME_METRICS])
    metrics = "".join(f"| `vllm:{name}` | {text} |\n" for name, text in OTHER_METRICS.items())
    parts = (
        _HEAD,
        flags,
        *_flags(),
        "\n",
        _FIELDS,
        *_fields(),
        *_exclusions(),
        "\n",
        _METRICS.format(same=same),
        metrics,
        _OTHERS,
    )
    return "".join(parts)


def _flags_of_one_name() -> str:
    """Return the part about flags and arguments that both have."""
    head, _, arguments = _FLAGS.partition("`LLM` takes")
    filled = f"`LLM` takes{arguments}".format(arguments=_named(SAME_ARGUMENTS), permitted=_named(PERMITTED_ARGUMENTS))
    return head.format(names=_listed(SAME_FLAGS)) + textwrap.fill(filled, 120, break_on_hyphens=False) + "\n"


def _named(names: Sequence[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _listed(names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) + ".", 120, break_on_hyphens=False)


def _flags() -> Iterator[str]:
    yield _OTHER_FLAGS
    by_answer: dict[str, list[str]] = {}
    for each in foreign_flags():
        by_answer.setdefault(_marked(each.answer), []).extend(each.names)
    for answer, names in by_answer.items():
        yield f"| {' '.join(f'`{name}`' for name in names)} | {_cell(answer)} |\n"


def _fields() -> Iterator[str]:
    for api in FOREIGN_APIS:
        yield f"\n### {api.name}\n\n`POST {api.path}`. These work:\n\n{_listed(api.works.split())}\n"
        if api.refused or api.ignored:
            yield "\n| field | outcome | |\n|---|---|---|\n"
        for outcome, fields in (("refused", api.refused), ("ignored", api.ignored)):
            for name, note in fields.items():
                yield f"| `{name}` | {outcome} | {_cell(note)} |\n"


def _exclusions() -> Iterator[str]:
    yield _EXCLUSIONS
    for each in EXCLUSIONS:
        one, other = (" ".join(f"`{name}`" for name in names.split()) for names in (each.one, each.other))
        yield f"| {one} | {other} | {'gives way' if each.gives_way else 'refused'} | {each.reason} |\n"


def _marked(answer: str) -> str:
    """Return an answer with its flags as code."""
    answer = answer.removeprefix("use ")
    return answer if "`" in answer else re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", answer)


def _cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return text.replace("|", "\\|")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SAME_FLAGS = _names(
    """
    --api-key --async-scheduling --attention-backend --block-size --config --cpu-offload-gb
    --disable-hybrid-kv-cache-manager --disable-log-stats
    --distributed-executor-backend --dtype --enable-chunked-prefill --enable-eplb --enable-logging-iteration-details
    --enable-lora --enable-prefix-caching --enable-prompt-embeds --eplb-config --exclude-tools-when-tool-choice-none
    --host --kv-cache-dtype
    --kv-cache-memory-bytes --long-prefill-token-threshold --lora-modules --max-cpu-loras --max-logprobs
    --max-lora-rank --max-loras --max-model-len --max-num-batched-tokens --max-num-seqs --model-impl
    --num-gpu-blocks-override --port --quantization --reasoning-parser --scheduling-policy --served-model-name
    --speculative-config --tool-call-parser
    """
)
"""Options of ``tokenloom serve`` that ``vllm serve`` has under the same name and with the same meaning."""

SAME_ARGUMENTS = _names(
    """
    model tokenizer tensor_parallel_size dtype quantization seed gpu_memory_utilization kv_cache_memory_bytes
    enforce_eager runner pooler_config chat_template disable_log_stats
    """
)
"""Those arguments that vLLM's ``LLM`` documents and ours has too."""

PERMITTED_ARGUMENTS = _names("trust_remote_code enable_sleep_mode disable_custom_all_reduce")
"""Arguments whose false is vLLM's default, and whose true changes nothing either."""

SAME_METRICS = _names(
    """
    cache_config_info corrupted_requests_total e2e_request_latency_seconds external_prefix_cache_hits_total
    external_prefix_cache_queries_total generation_tokens_total inter_token_latency_seconds iteration_tokens_total
    kv_cache_usage_perc num_preemptions_total num_requests_running num_requests_waiting prefix_cache_hits_total
    prefix_cache_queries_total prompt_tokens_by_source_total prompt_tokens_total lora_requests_info
    request_decode_time_seconds request_generation_tokens request_inference_time_seconds
    request_max_num_generation_tokens request_params_max_tokens request_params_n request_prefill_kv_computed_tokens
    request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds request_success_total
    request_time_per_output_token_seconds spec_decode_num_accepted_tokens_per_pos_total
    spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total spec_decode_num_drafts_total
    time_to_first_token_seconds
    """
)
"""Metrics that mean the same and have the same name, without vLLM's prefix."""

OTHER_METRICS = {
    "engine_sleep_state": "`GET /is_sleeping` at the gateway, with an admin key",
    "estimated_flops_per_gpu_total": "not available; `tokenloom bench step` compares a step with the machine",
    "mm_cache_hits_total": "`tokenloom_encoder_items_found_total` of encoders",
    "mm_cache_queries_total": "`tokenloom_rows_items_asked_total`: what is in the prefix cache is not asked for",
    "nixl_num_failed_transfers_total": "`tokenloom_kv_recompute_total` counts failed transfers by reason",
    "nixl_xfer_time_seconds": "`tokenloom_kv_transfer_bytes_total` by transport; the time is in a request's timeline",
    "time_per_output_token_seconds": "`vllm:inter_token_latency_seconds`, as in vLLM itself since it dropped the name",
}
"""Metrics without a namesake, and what to use instead."""
