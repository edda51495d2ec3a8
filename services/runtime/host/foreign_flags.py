"""Answers flags of ``vllm serve`` that Tokenloom does not have: what to use instead, or what holds without it.

A flag that both have under one name (``--max-num-seqs``) is an option of ours and stands in no table here.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from .options import did_you_mean

_MACHINES = "see docs/use/two-machines.md and docs/operate/kubernetes.md"
_OFFLOAD = "use --kv-offload-path and --kv-offload-bytes"
_ENVIRONMENT = "set the environment variable "
_HUB = "write the revision after the name of the model: org/name@REVISION"
_DEFAULTS = "edit generation_config.json of the checkpoint"
_CONFIG = "edit config.json of the checkpoint"
_TEXT_ONLY = "models read text only; images and audio are refused by name"
_LOG = "prompts and outputs are never logged"

ANSWERS = {
    # The edge.
    "--uds": "run `python -m tokenloom.services.gateway --http-listen unix:/PATH`",
    "--api-server-count -asc": "use --gateways",
    "--grpc": "gRPC is always served, on --grpc-port",
    "--allowed-origins": "use --cors-origins",
    "--ssl-keyfile": "use --public-tls-key",
    "--ssl-certfile": "use --public-tls-cert",
    "--ssl-ca-certs": "use --api-key-file",
    "--enable-request-id-headers": "every response carries x-request-id",
    "--enable-server-load-tracking": "see GET /load, which is always served",
    "--shutdown-timeout": "use --drain-timeout",
    "--enable-sleep-mode": "use --admin-api-key, and POST /sleep",
    "--weight-transfer-config": "call EngineAdmin.ReloadWeights",
    "--renderer-num-workers": "use --render-workers",
    # Logs, metrics, traces.
    "--uvicorn-log-level": "use --log-level",
    "--log-config-file": "use --log-level and --log-format",
    "--enable-log-requests": "the gateway logs each request that has ended",
    "--disable-log-requests": "use --no-access-log",
    "--disable-uvicorn-access-log": "use --no-access-log",
    "--disable-access-log-for-endpoints": "use --no-access-log",
    "--enable-log-outputs": _LOG,
    "--enable-log-deltas": _LOG,
    "--max-log-len": _LOG,
    "--disable-log-stats": "see GET /metrics, which has the statistics",
    "--otlp-traces-endpoint": "use --otlp-endpoint",
    "--collect-detailed-traces": "use --otlp-endpoint",
    "--profiler-config": "use --profiler-dir",
    # Requests.
    "--chat-template-content-format": "the tokenizer finds out which form the chat template reads",
    "--default-chat-template-kwargs": "send chat_template_kwargs in the request",
    "--return-tokens-as-token-ids": "send return_tokens_as_token_ids in the request",
    "--enable-force-include-usage": "send stream_options.include_usage in the request",
    "--enable-prompt-tokens-details": "usage always holds the number of cached prompt tokens",
    "--enable-return-routed-experts": "send return_routed_experts in the request",
    "--logits-processors": "send logit_bias, bad_words or allowed_token_ids in the request",
    "--seed": "send seed in the request",
    "--response-role": "answers always have the role assistant",
    "--enable-auto-tool-choice": "use --tool-call-parser",
    "--tool-parser-plugin": "use --tool-call-parser",
    "--reasoning-parser-plugin": "use --reasoning-parser",
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--media-io-kwargs": _TEXT_ONLY,
    "--allowed-local-media-path": _TEXT_ONLY,
    # The model and its files.
    "--task": "use --runner",
    "--convert": "use --runner",
    "--revision": _HUB,
    "--code-revision": _HUB,
    "--tokenizer-revision": _HUB,
    "--hf-token": f"{_ENVIRONMENT}HF_TOKEN",
    "--download-dir": f"{_ENVIRONMENT}HF_HUB_CACHE",
    "--hf-overrides": _CONFIG,
    "--rope-scaling": _CONFIG,
    "--rope-theta": _CONFIG,
    "--generation-config": _DEFAULTS,
    "--override-generation-config": _DEFAULTS,
    "--trust-remote-code": "code of a checkpoint is never run",
    "--override-attention-dtype": "use --dtype",
    "--cpu-offload-gb": "use --quantization",
    "--disable-sliding-window": "use --max-model-len",
    "--attention-config": "use --attention-backend",
    "--compilation-config -cc -O": "use --enforce-eager",
    "--cudagraph-capture-sizes": "use --max-num-seqs",
    # KV cache and scheduling.
    "--swap-space": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--kv-events-config": "use --kv-events",
    "--kv-transfer-config": "use --prefill and --decode, and --kv-transports",
    "--calculate-kv-scales": "use --kv-cache-dtype",
    "--max-num-partial-prefills": "use --prefill-tokens-beside-decode",
    "--max-long-partial-prefills": "use --long-prefill-token-threshold",
    "--scheduler-reserve-full-isl": "use --reserve-full-prompt",
    "--scheduler-cls": "use --scheduling-policy",
    "--num-scheduler-steps": "use --async-scheduling",
    "--stream-interval": "use --frame-interval",
    "--guided-decoding-backend": "use --structured-outputs-backend",
    "--guided-decoding-disable-any-whitespace": "use --disable-any-whitespace",
    "--structured-outputs-config": "use --structured-outputs-backend, --disable-any-whitespace and "
    "--enable-in-reasoning",
    "--speculative-model": "use --speculative-config",
    "--num-speculative-tokens": "use --speculative-config",
    # Several workers, engines and machines.
    "-tp": "use --tensor-parallel-size",
    "-pp": "use --pipeline-parallel-size",
    "-dcp": "use --decode-context-parallel-size",
    "--prefill-context-parallel-size -pcp": "use --decode-context-parallel-size",
    "-ep": "use --enable-expert-parallel",
    "--all2all-backend": "use --enable-expert-parallel",
    "--expert-placement-strategy": "use --enable-eplb",
    "-dp": "use --data-parallel-size",
    "-dpl": "use --data-parallel-size-local",
    "-dpr": "use --data-parallel-start-rank",
    "-dph": "use --data-parallel-hybrid-lb",
    "-dpe": "use --data-parallel-external-lb",
    "-dpa": "use --data-parallel-address",
    "--numa-bind": "use --cpus",
    "--data-parallel-backend -dpb": _MACHINES,
    "--data-parallel-rpc-port -dpp": _MACHINES,
    "--headless": _MACHINES,
    "--nnodes -n": _MACHINES,
    "--node-rank -r": _MACHINES,
    "--master-addr": _MACHINES,
    "--master-port": _MACHINES,
}


_OWN = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_COMMAND = re.compile(r"`[^`]*`")
"""A command in an answer, whose flags are not options of ``tokenloom serve``."""


@dataclass(frozen=True)
class ForeignFlag:
    """Describes one flag of ``vllm serve``."""

    names: tuple[str, ...]
    """The flag as users write it, then its short forms: ``("--tensor-parallel-size", "-tp")``."""
    answer: str
    """A clause that names what to use or the reason; it continues a sentence."""

    @property
    def own(self) -> tuple[str, ...]:
        """The options of ``tokenloom serve`` that the answer names, without ``--no-``."""
        named = _OWN.findall(_COMMAND.sub("", self.answer))
        return tuple(dict.fromkeys(name.replace("--no-", "--") for name in named))

    def sentence(self, name: str, offered: Collection[str]) -> str:
        """Return the answer to a user who wrote ``name`` for a command that offers these flags."""
        of_serve = "" if set(self.own) <= set(offered) else ", with `tokenloom serve`"
        return f"{name} is a flag of vLLM: {self.answer}{of_serve}"


@cache
def foreign_flags() -> tuple[ForeignFlag, ...]:
    """Return the flags of vLLM that are answered, in the order of the table."""
    return tuple(ForeignFlag(tuple(names.split()), answer) for names, answer in ANSWERS.items())


def answer_unknown(written: str, own: Collection[str]) -> str:
    """Return one sentence about a flag that a command does not have.

    Args:
        written: The argument as the user wrote it, perhaps with ``=value``.
        own: The flags of the command.
    """
    name = written.partition("=")[0]
    known = _by_name()
    for spelling in (name, name.replace("_", "-"), "--" + name.removeprefix("--no-").replace("_", "-")):
        if spelling in known:
            return known[spelling].sentence(name, own)
    return f"{name}: no such option{did_you_mean(name, own)}"


@cache
def _by_name() -> dict[str, ForeignFlag]:
    return {name: each for each in foreign_flags() for name in each.names}
