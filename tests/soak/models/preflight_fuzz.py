"""``python -m tests.soak.models.preflight_fuzz``: preflight and engine agree about random checkpoints.

A seed chooses a causal type of transformers with random sizes and switches, whole or in a quantized format, a damaged
one, an encoder, a released layout, also of those that read images or sound, or a type of GGUF, and options of the
engine, of which a second generator adds some that exclude parts of models, and a third one a draft model. What
preflight admits must load; what it refuses for its type must not load without it.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import GGMLQuantizationType as Kind
from msgspec.structs import replace
from transformers import AutoConfig

from tests.checkpoints.whole_sound import WRITERS, write_whole_sound
from tests.gpu_worker.checkpoint.gguf import files, state_models
from tests.gpu_worker.checkpoint.gguf.architectures import MODELS, make, write_model
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS, FORMATS
from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tests.parity.reference import compute_case
from tests.parity.state_checkpoints import make_model
from tests.parity.test_text_of_vision import QUANTIZED, TOWERS
from tests.parity.vision_checkpoints import CONFIGS, load_vision, write_vision
from tests.soak.models.releases import RELEASES, write_release
from tests.soak.models.strict_entries import encoder_class, encoder_types
from tests.soak.models.tiny_configs import save_tiny, switches, tiny_config
from tests.soak.models.transformers_models import KINDS, PROMPTS, quiet
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    PoolerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.gpu_worker.checkpoint.files.architectures import ARCHITECTURES
from tokenloom.gpu_worker.devices import CPUWorker, make_worker
from tokenloom.preflight.model import answer
from tokenloom.preflight.small_files import CannotServe

Verdict = Literal["served", "refused", "untried", "no model", "rounded", "other weights", "disagreement"]
"""``rounded``: the self-check at load finds the roundings of random weights in few bits too large: no matter of the
configuration. ``other weights``: a damaged configuration is a valid one of another model."""
_OTHER_WEIGHTS = (
    "the checkpoint has no tensor",
    "the checkpoint holds tensors",
    "has another shape",
    "has shape",
    "ignore_mismatched_sizes",
)


def _sizes(random_: random.Random, kind: str) -> dict[str, Any]:
    """Return random entries that most classes have."""
    text = tiny_config(kind).get_text_config(decoder=True)
    wanted = {
        "num_hidden_layers": random_.choice((1, 2, 3)),
        "sliding_window": random_.choice((8, 24, 200, None)),
        "tie_word_embeddings": random_.choice((True, False)),
    }
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        wanted[name] = random_.choice(("silu", "gelu", "relu2", "quick_gelu"))
    if not hasattr(text, "layer_types"):
        wanted["num_key_value_heads"] = random_.choice((1, 2, 4))
    chosen = {name: value for name, value in wanted.items() if hasattr(text, name) and random_.random() < 0.5}
    return chosen | {name: value for name, value in switches(kind) if random_.random() < 0.15}


def _of_transformers(random_: random.Random, directory: Path) -> Path:
    return _of_type(random_, directory, list(KINDS))


def _of_type(random_: random.Random, directory: Path, kinds: list[str]) -> Path:
    kind = random_.choice(kinds)
    path, model = save_tiny(kind, directory, **_sizes(random_, kind))
    compute_case(model, PROMPTS[1], 1, use_cache=False)
    AutoConfig.from_pretrained(path)  # which checks what was changed after the configuration was made
    return path


def _encoder(random_: random.Random, directory: Path) -> Path:
    kind = random_.choice(encoder_types())
    torch.manual_seed(0)
    path = directory / kind
    encoder_class(kind)(tiny_config(kind)).save_pretrained(path)
    return path


_WRONG: tuple[Any, ...] = (None, True, False, "x", 0.5, {}, [], 0)
_OFTEN = ("quantization_config", "num_attention_heads", "pad_token_id", "is_decoder", "dtype", "layer_types")


def _damaged(random_: random.Random, directory: Path) -> Path:
    """Write a checkpoint one of whose entries has a value of another kind."""
    path = random_.choice((_of_transformers, _encoder))(random_, directory)
    file = path / "config.json"
    entries = json.loads(file.read_text())
    # GPT-Neo alone counts these layers of its own, and every published file of it has them.
    names = sorted(entries.keys() - {"architectures", "model_type", "attention_types", "attention_layers"})
    name = random_.choice(random_.choice((names, _OFTEN)))
    odd = 5 if name == "num_attention_heads" else ["odd"] if name == "layer_types" else None
    entries[name] = random_.choice([value for value in (*_WRONG, odd) if value != entries.get(name)])
    file.write_text(json.dumps(entries))
    return path


def _built_in(random_: random.Random, directory: Path) -> Path:
    return _of_type(random_, directory, [kind for kind, name in KINDS.items() if name in ARCHITECTURES])


def _quantized(random_: random.Random, directory: Path) -> Path:
    path: Path = formats.write(directory, *FORMATS[random_.choice(list(FORMATS))])[0]
    return path


def _quantized_type(random_: random.Random, directory: Path) -> Path:
    """Write a type of transformers in a format whose groups fit its small sizes."""
    kind = random_.choice(list(KINDS))
    source, model = save_tiny(kind, directory)
    compute_case(model, PROMPTS[1], 1, use_cache=False)
    quantize, config = EXPERTS[random_.choice(list(EXPERTS))]
    path: Path = formats.write(directory / "files", quantize, config, source, ("lm_head",))[0]
    return path


def _released(random_: random.Random, directory: Path) -> Path:
    name = random_.choice(("gpt-oss as published", *RELEASES))
    return write_release(name, directory)[0] if name in RELEASES else write_gpt_oss(directory / "gpt-oss")


def _of_sound(random_: random.Random, directory: Path) -> Path:
    return write_whole_sound(random_.choice(list(WRITERS)), directory)


def _quantized_vision(random_: random.Random, directory: Path) -> Path:
    kind, quantize, config = QUANTIZED[random_.choice(list(QUANTIZED))]
    path: Path = formats.write(directory / "files", quantize, config, write_vision(kind, directory), TOWERS)[0]
    return path


def _gguf_with_states(random_: random.Random, directory: Path) -> Path:
    architecture = random_.choice(list(state_models.ARCHITECTURES))
    model = make_model(state_models.ARCHITECTURES[architecture][0], **state_models.ENTRIES.get(architecture, {}))
    return state_models.write(directory / "demo.gguf", architecture, model, random_.choice((Kind.F32, Kind.Q8_0)))


def _of_vision(random_: random.Random, directory: Path) -> Path:
    kind = random_.choice(list(CONFIGS))
    entries = {"tie_word_embeddings": random_.choice((True, False))} if random_.random() < 0.3 else {}
    entries |= {"odd_feature": 1} if random_.random() < 0.1 else {}
    path = write_vision(kind, directory, **entries)
    load_vision(path)
    return path


def _gguf(random_: random.Random, directory: Path) -> Path:
    path = directory / "demo.gguf"
    kind = random_.choice((Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.Q2_K, Kind.IQ4_XS, Kind.MXFP4))
    name = random_.choice((None, *MODELS))
    if name is None:
        files.write_demo(path, kind)
        return path
    architecture, model_type, entries, _ = MODELS[name]
    with torch.inference_mode():
        model = make(model_type, **entries)
        return write_model(path, architecture, model, kind if kind in (Kind.Q8_0, Kind.Q4_0) else Kind.F32)


_MAKERS: tuple[Callable[[random.Random, Path], Path], ...] = (
    *(_of_transformers,) * 8,
    *(_damaged,) * 4,
    _encoder,
    _of_vision,
    _quantized,
    _gguf,
)
_MORE_MAKERS: tuple[Callable[[random.Random, Path], Path], ...] = (
    *(_quantized_type,) * 3,
    _released,
    _of_sound,
    _quantized_vision,
    _gguf_with_states,
)
_DRAFTS = (*(_built_in,) * 6, _of_transformers, _encoder, _quantized, _gguf, _of_vision, _damaged)
FIRST_OF_MORE = 1000
"""The seeds below choose among ``_MAKERS``, those from here on among all and with more options."""
FIRST_WITH_DRAFTS = 100_000
"""From this seed on another checkpoint drafts."""


def _options(random_: random.Random, path: Path) -> EngineConfig:
    worker = WorkerConfig(
        model=str(path),
        device="cpu",
        num_threads=1,
        dtype=random_.choice(("auto", "float32", "bfloat16")),
        quantization=random_.choice((None, None, "int8-dynamic", "int4")),
        model_impl=random_.choice(("auto", "auto", "native", "transformers")),
        language_model_only=random_.random() < 0.8,
    )
    cache = CacheConfig(num_blocks=256, block_size=16)
    return EngineConfig(worker=worker, cache=cache, max_model_len=random_.choice((None, 32, 64, 128, 1000)))


_MORE_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "worker": (
        {"batch_invariant": True},
        {"runner": "pooling"},
        {"runner": "generate"},
        {"pooler_config": PoolerConfig(pooling_type="MEAN")},
        {"load_format": "dummy"},
        {"attention_backend": "torch"},
        {"attention_backend": "cpu"},
        {"attention_backend": "reference"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"device": "cuda"},
        {"enforce_eager": True},
        {"state_prompts": "scan"},
        {"state_prompts": "chunks"},
    ),
    "cache": (
        {"dtype": "int8"},
        {"dtype": "fp8"},
        *({"block_size": size} for size in (8, 24, 32, 48)),
        {"state_memory_bytes": 1 << 24},
        {"disable_hybrid_kv_cache_manager": True},
        {"enable_prefix_caching": False},
    ),
    "scheduler": (
        {"max_num_batched_tokens": 80, "max_num_seqs": 4},
        {"max_num_batched_tokens": 48, "max_num_seqs": 48},
        {"long_prefill_token_threshold": 32},
        {"enable_chunked_prefill": False},
    ),
    "lora": ({"enable": True},),
    "speculative": tuple({"method": method} for method in ("ngram", "suffix", "mtp")),
}
"""By the part of the configuration, values that exclude each other or parts of models."""


def _with_more(random_: random.Random, config: EngineConfig) -> tuple[EngineConfig, str]:
    """Return the configuration with up to three more options, and their names."""
    chosen = []
    for part in random_.sample(list(_MORE_OPTIONS), random_.choice((0, 1, 1, 2, 3))):
        values = random_.choice(_MORE_OPTIONS[part])
        before = getattr(config, part)
        after = SpeculativeConfig(**values) if part == "speculative" else replace(before, **values)
        config = replace(config, **{part: after})
        chosen.append(" ".join(f"{name}={value}" for name, value in values.items()))
    return config, ", ".join(chosen)


def _with_draft(random_: random.Random, config: EngineConfig, directory: Path) -> tuple[EngineConfig, str]:
    """Return the configuration with a draft model, and its name."""
    path = random_.choice(_DRAFTS)(random_, directory)
    return replace(config, speculative=SpeculativeConfig("draft_model", model=str(path))), f"draft {path.name}"


def _folder(directory: Path, name: str) -> Path:
    """Return a new folder, in which a checkpoint is written."""
    (directory / name).mkdir()
    return directory / name


def compare(seed: int, directory: Path) -> tuple[Verdict, str]:
    """Return what preflight and engine say of the seed's checkpoint, and a line about it."""
    random_ = random.Random(seed)
    makers = _MAKERS if seed < FIRST_OF_MORE else _MAKERS + _MORE_MAKERS
    if has_draft := seed >= FIRST_WITH_DRAFTS:
        makers += (_built_in,) * len(makers)
    more = ""
    try:
        path = random_.choice(makers)(random_, _folder(directory, "model"))
        plain = config = _options(random_, path)
        if has_draft:
            config, more = _with_draft(random_, config, _folder(directory, "draft"))
        elif seed >= FIRST_OF_MORE:
            config, more = _with_more(random_, config)
    except Exception as error:
        return "no model", f"transformers makes none: {type(error).__name__}"
    worker = config.worker
    about = f"{path.name} {worker.model_impl} {worker.dtype} {worker.quantization} {config.max_model_len} {more}"
    try:
        found = answer(path, config)
    except CannotServe as refusal:
        is_type = "docs/reference/models.md" in str(refusal)
        # The self-check, which finds some of these types, allows for roundings in few bits.
        exact = replace(plain, worker=replace(plain.worker, dtype="float32", quantization=None))
        if is_type and _refusal(exact, CPUWorker) is None:
            return "disagreement", f"{about}: refused, but it loads: {refusal}"
        return "refused", f"{about}: {refusal}"
    reason = _refusal(config, make_worker)
    if reason is not None and any(text in reason for text in _OTHER_WEIGHTS):
        return "other weights", f"{about}: {reason}"
    if reason is not None and worker.quantization is not None and "differ from transformers' own" in reason:
        return "rounded", f"{about}: {reason}"
    if not found.is_tried:
        return "untried", f"{about}: {reason or 'loads'}"
    return ("served", about) if reason is None else ("disagreement", f"{about}: admitted, but {reason}")


def _refusal(config: EngineConfig, make: Callable[[EngineConfig], Worker]) -> str | None:
    """Return why the engine does not start; None: it does."""
    try:
        EngineCore(config, UniProcExecutor(make(config))).shutdown()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def run(seeds: range) -> Iterator[tuple[int, Verdict, str]]:
    """Compare the checkpoint of each seed."""
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="tl-") as directory:
            yield seed, *compare(seed, Path(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    arguments = parser.parse_args()
    quiet()
    counts: Counter[str] = Counter()
    for seed, verdict, text in run(range(arguments.first, arguments.first + arguments.count)):
        counts[verdict] += 1
        print(seed, verdict, text, flush=True)
    print(dict(counts))
    sys.exit(counts["disagreement"] > 0)


if __name__ == "__main__":
    main()
