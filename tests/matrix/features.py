"""The features of the matrix: how each is switched on, which model it needs, and how it shows that it acted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Task = Literal["tokens", "vectors"]


class Seen(NamedTuple):
    """What a mesh showed while it answered."""

    metrics: Mapping[str, float]
    """The sums of its engines' samples by metric, and by ``metric{label="value"}`` for each label."""
    processes: list[str]
    """The command of each of its processes."""
    busy_engines: int
    """Engines that generated tokens, or read prompts."""
    computed: list[str]
    """What each engine says of how it computes and what its KV is: its numerics and the layout of its blocks."""
    is_other_than_without: bool
    """Whether the answers differ from those without the feature."""


def _metric(name: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.metrics.get(name, 0.0) > 0


def _workers(count: int) -> Callable[[Seen], bool]:
    return lambda seen: sum("worker_main" in each or "ray::" in each for each in seen.processes) >= count


def _computed(word: str) -> Callable[[Seen], bool]:
    return lambda seen: bool(seen.computed) and all(word in each for each in seen.computed)


def _differs(seen: Seen) -> bool:
    return seen.is_other_than_without


def _always(_: Seen) -> bool:
    return True


@dataclass(frozen=True)
class Feature:
    """Describes one feature."""

    flags: tuple[str, ...] = ()
    """Of ``tokenloom serve``."""
    base: str = "dense"
    """The model that it needs, if that is not the dense one."""
    stored: str = ""
    """How the model's weights are stored."""
    seats: frozenset[str] = field(default_factory=frozenset)
    """Of two features that share one of these, a mesh has one or the other."""
    task: Task = "tokens"
    changes_answers: bool = False
    """Whether the answers are compared with those of a mesh that has this feature too, without the other."""
    acted: Callable[[Seen], bool] = _always
    proof: str = ""
    """What ``acted`` has looked at."""


def _one(*seats: str) -> frozenset[str]:
    return frozenset(seats)


def _drafts(config: str) -> Feature:
    return Feature(
        flags=("--speculative-config", config),
        seats=_one("drafts"),
        acted=_metric("vllm:spec_decode_num_accepted_tokens_total"),
        proof="accepted drafts",
    )


def _file(stored: str) -> Feature:
    return Feature(stored=stored, seats=_one("weights"), proof="the file holds no other weights")


def _rounded(kind: str) -> Feature:
    return Feature(
        flags=("--quantization", kind),
        seats=_one("weights"),
        changes_answers=True,
        acted=_computed(f"/{kind}/"),
        proof="the engines' numerics",
    )


def _apart(transport: str) -> Feature:
    return Feature(
        flags=("--prefill", "1", "--decode", "1", "--pd-threshold", "0", "--kv-transports", transport),
        seats=_one("roles"),
        acted=_metric(f'tokenloom_kv_transfer_bytes_total{{transport="{transport}"}}'),
        proof="bytes of KV moved",
    )


FEATURES: dict[str, Feature] = {
    "tensor parallel": Feature(
        flags=("--tensor-parallel-size", "2"), seats=_one("tp"), acted=_workers(2), proof="two workers"
    ),
    "pipeline": Feature(
        flags=("--pipeline-parallel-size", "2"), seats=_one("pp"), acted=_workers(2), proof="two workers"
    ),
    "context parallel": Feature(
        flags=("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"),
        seats=_one("tp"),
        acted=_workers(2),
        proof="two workers",
    ),
    "data parallel": Feature(
        flags=("--data-parallel-size", "2"),
        seats=_one("dp"),
        acted=lambda seen: seen.busy_engines >= 2,
        proof="two engines computed",
    ),
    "expert parallel": Feature(
        flags=("--data-parallel-size", "2", "--enable-expert-parallel"),
        base="experts",
        seats=_one("dp"),
        acted=lambda seen: seen.busy_engines >= 2,
        proof="two engines computed",
    ),
    "GPTQ": _file("GPTQ"),
    "AWQ": _file("AWQ"),
    "FP8": _file("FP8"),
    "int8 file": _file("int8 file"),
    "GGUF": _file("GGUF"),
    "int4": _rounded("int4"),
    "int8-dynamic": _rounded("int8-dynamic"),
    "LoRA": Feature(
        flags=("--enable-lora",), changes_answers=True, acted=_differs, proof="other tokens than without the adapter"
    ),
    "n-gram drafts": _drafts('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'),
    "draft model": _drafts('{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}'),
    "EAGLE": _drafts('{"method": "eagle", "model": "EAGLE", "num_speculative_tokens": 3}'),
    "async": Feature(flags=("--async-scheduling",), proof="the option was taken"),
    "structured output": Feature(changes_answers=True, acted=_differs, proof="other tokens than without the pattern"),
    "pooling": Feature(
        flags=("--runner", "pooling", "--pooler-config", '{"pooling_type": "LAST"}'),
        task="vectors",
        seats=_one("task"),
        proof="vectors were returned",
    ),
    "encoder": Feature(base="encoder", task="vectors", seats=_one("task"), proof="vectors were returned"),
    "prompt embeddings": Feature(
        flags=("--enable-prompt-embeds",), seats=_one("prompt"), proof="requests had embeddings and no ids"
    ),
    "windows": Feature(base="window", proof="the model's layers attend to 24 tokens"),
    "states": Feature(base="states", acted=_computed("/state/"), proof="slots for states in the layout of the KV"),
    "images": Feature(base="images", seats=_one("prompt"), proof="each prompt showed an image"),
    "P/D by shm": _apart("shm"),
    "P/D by socket": _apart("socket"),
    "offload": Feature(
        flags=("--kv-offload-path", "OFFLOAD", "--kv-offload-bytes", "100000000", "--num-kv-blocks", "40"),
        acted=_metric("vllm:external_prefix_cache_hits_total"),
        proof="prompt tokens whose KV came back from the file",
    ),
    "int8 KV": Feature(
        flags=("--kv-cache-dtype", "int8"),
        changes_answers=True,
        acted=_computed("/int8+fp32/"),
        proof="the layout of the KV",
    ),
    "transformers' modules": Feature(
        flags=("--model-impl", "transformers"), acted=_computed("/transformers-"), proof="the engines' numerics"
    ),
    "sleep": Feature(proof="the engines slept between two rounds"),
    "reload": Feature(proof="the engines loaded their weights again between two rounds"),
    "Ray": Feature(
        flags=("--distributed-executor-backend", "ray"),
        acted=lambda seen: any("ray::" in each for each in seen.processes),
        proof="a worker of Ray",
    ),
}
"""By the names that the page shows."""


def shapes_model(feature: Feature) -> bool:
    """Return whether the model of a mesh is another one because of it."""
    return bool(feature.stored) or feature.base != "dense"


def nonsense(first: str, second: str) -> str:
    """Return why a mesh cannot have both features, whatever is built; empty: it could."""
    one, other = FEATURES[first], FEATURES[second]
    if shared := one.seats & other.seats:
        return {
            "weights": "weights have one form",
            "drafts": "one method drafts",
            "roles": "engines have one division of work",
            "task": "a model returns text or vectors",
            "prompt": "a prompt is of one or the other",
        }.get(min(shared), "two values of one option")
    tasks = {one.task, other.task}
    generating = {"n-gram drafts", "draft model", "EAGLE", "structured output", "P/D by shm", "P/D by socket"}
    if tasks == {"tokens", "vectors"} and generating & {first, second}:
        return "vectors are not generated"
    if "encoder" in {first, second}:
        if {one.base, other.base} - {"dense", "encoder"}:
            return "each is of another model"
        if {"int8 KV", "offload", "prompt embeddings", "context parallel"} & {first, second}:
            return "an encoder has no KV"
    return ""
