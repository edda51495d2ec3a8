"""What an engine does beside plain decoding, each against the tokens of the same engine without it, or of a CPU: sleep
and wake, quantized checkpoints, experts, adapters, drafts, layers that keep a state, the default limits of a
step, kernels that are compiled in service, attention of libraries, and NCCL."""

import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import GPU, Target
from tests.gpu_worker.checkpoint.quantization import formats
from tests.parity.engine import Engine
from tokenloom import demo_adapters
from tokenloom.bench.random_model import SHAPES, write_model
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig, SchedulerConfig, SpeculativeConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.gpu_worker.layers.weight_memory import is_on_host, tensors_of
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.parallel.torch_group import TorchGroup, _nccl
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.runtime.host.options import gpu_defaults

PROMPTS = [
    [(7 * index + 11 * place) % 1900 + 50 for place in range(length)] for index, length in enumerate((1, 16, 90))
]
LIMITS = [24] * len(PROMPTS)
ADAPTER = Path(demo_adapters.__file__).parent / "pirate"
_EXPERTS = SHAPES["tiny-fp32"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_QUANTIZED = {
    "gptq": (formats.gptq(4, 128, symmetric=True), _GPTQ),
    "fp8": (formats.fp8("channel", "scale"), _FP8),
}


def run(rows: Rows, target: Target = GPU) -> None:
    wrong = []
    with tempfile.TemporaryDirectory(prefix="tl-features-") as folder:
        for name, check in CHECKS.items():
            if check is nccl and not target.has_gpu:
                rows.skip(name, "NCCL moves memory of GPUs")
                continue
            (own := Path(folder) / check.__name__).mkdir()
            try:
                is_right = check(rows, target, own)
            except Exception as error:  # one feature that fails hides no other
                traceback.print_exc()
                rows.add(name, error=f"{type(error).__name__}: {error}"[:200])
                is_right = False
            wrong += [] if is_right else [name]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


@contextmanager
def running(model: Path, target: Target, **options: Any) -> Iterator[Engine]:
    own: dict[str, Any] = {"num_blocks": 200, "budget": 512, "max_model_len": 256}
    own |= {} if target.has_gpu else {"attention_backend": "torch"}
    engine = Engine(model, device=target.device.type, **(own | options))
    try:
        yield engine
    finally:
        engine.core.shutdown()
        if target.has_gpu:
            torch.cuda.empty_cache()


def on_cpu(model: Path, **options: Any) -> list[list[int]]:
    """Return the tokens of a CPU, in float32."""
    with running(model, Target(torch.device("cpu")), **options) as engine:
        return engine.generate(PROMPTS, LIMITS)


def _different(found: list[list[int]], expected: list[list[int]]) -> int:
    return sum(one != other for one, other in zip(found, expected, strict=True))


def kept(workers: list[ModelWorker]) -> Callable[[EngineConfig], Executor]:
    """Return what makes an executor and appends its worker to ``workers``."""

    def executor(config: EngineConfig) -> Executor:
        worker = make_worker(config)
        assert isinstance(worker, ModelWorker)
        workers.append(worker)
        return UniProcExecutor(worker)

    return executor


def sleep(rows: Rows, target: Target, folder: Path) -> bool:
    """Both levels, with graphs that are captured anew afterwards."""
    workers = list[ModelWorker]()
    with running(DEMO_MODEL, target, executor=kept(workers)) as engine:
        before, different, freed = engine.generate(PROMPTS, LIMITS), 0, 0
        for level in (1, 2):
            found = workers[0].sleep(level)
            freed += found.weights + found.kv_cache
            if level == 2:
                workers[0].reload_weights(str(DEMO_MODEL))
            workers[0].wake_up(["weights", "kv_cache"] if level == 1 else ["kv_cache"])
            different += _different(engine.generate(PROMPTS, LIMITS), before)
    rows.add("sleep and wake, 2 levels", different=different, megabytes_freed=freed / 1e6)
    return not different


def quantized(rows: Rows, target: Target, folder: Path) -> bool:
    """In bfloat16, in which stored integers are not unpacked on a CPU; the same weights, so the same tokens."""
    wrong = 0
    for name, (quantize, config) in _QUANTIZED.items():
        paths = formats.write(folder / name, quantize, config)
        found = []
        for path in paths:
            with running(path, target, dtype="bfloat16") as engine:
                found.append(engine.generate(PROMPTS, LIMITS))
        different = _different(*found)
        rows.add(f"quantized checkpoint, {name}", different=different)
        # A CPU rounds inputs to 8 bits, and a GPU those of 8-bit floats: tokens that are nearly as likely may differ.
        wrong += (different > (len(PROMPTS) // 2 if name == "fp8" else 0)) if target.has_gpu else 0
    return not wrong


def stored_packed(rows: Rows, target: Target, folder: Path) -> bool:
    """A file of 8 or 4 bits takes about half or a third of the memory of a 16-bit one: the embeddings stay wide."""
    right = True
    for name, most in {"fp8": 0.8, "gptq": 0.7}.items():
        sizes = list[int]()
        for path in formats.write(folder / name, *_QUANTIZED[name]):
            workers = list[ModelWorker]()
            with running(path, target, dtype="bfloat16", executor=kept(workers)):
                sizes.append(workers[0].sleep(1).weights)
        rows.add(f"weights as stored, {name}", megabytes=sizes[0] / 1e6, megabytes_in_16_bits=sizes[1] / 1e6)
        right &= not target.has_gpu or sizes[0] < most * sizes[1]
    return right


def on_host(rows: Rows, target: Target, folder: Path) -> bool:
    """Half of the weights stay in memory of the host, and graphs read them there."""
    with running(DEMO_MODEL, target) as engine:
        expected = engine.generate(PROMPTS, LIMITS)
    if not target.has_gpu:
        rows.skip("weights on the host", "a CPU has no other memory")
        return True
    workers = list[ModelWorker]()
    with running(DEMO_MODEL, target, cpu_offload_gb=0.002, executor=kept(workers)) as engine:
        different = _different(engine.generate(PROMPTS, LIMITS), expected)
        staying = sum(each.nbytes for each in tensors_of(workers[0]._model) if is_on_host(each))
    rows.add("weights on the host, float32", different=different, megabytes=staying / 1e6)
    return not different and staying > 0


def experts(rows: Rows, target: Target, folder: Path) -> bool:
    """From a file: random weights of ``load_format`` dummy are others on a GPU than on a CPU."""
    import transformers

    torch.manual_seed(0)
    sizes = {name: value for name, value in _EXPERTS.items() if name not in ("architectures", "model_type", "dtype")}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).float().save_pretrained(folder)
    with running(folder, target) as engine:
        found = engine.generate(PROMPTS, LIMITS)
    different = _different(found, on_cpu(folder))
    rows.add("experts, float32", different=different)
    return not different


def adapters(rows: Rows, target: Target, folder: Path) -> bool:
    """One prompt with an adapter beside others without."""
    lora, found = LoraConfig(enable=True, modules=(f"pirate={ADAPTER}",)), []
    for each in (target, Target(torch.device("cpu"))):
        with running(DEMO_MODEL, each, lora=lora) as engine:
            assert engine.core.adapters is not None
            digests = [state.digest for state in engine.core.adapters.answer().adapters]
            found.append(engine.generate(PROMPTS, LIMITS, adapters=[b"", b"", *digests]))
            plain = engine.generate(PROMPTS, LIMITS)
    different, changed = _different(*found), _different(found[1], plain)
    rows.add("adapters, float32", different=different, changed=changed)
    return not different and changed == 1


def drafts(rows: Rows, target: Target, folder: Path) -> bool:
    """The model drafts for itself, which changes no token; nearly all of its drafts are right."""
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model=str(DEMO_MODEL))
    with running(DEMO_MODEL, target, speculative=speculative) as engine:
        engine.core.scheduler.drafts.free_rows = None  # drafts however long rows take that verify them
        different, stats = _different(engine.generate(PROMPTS, LIMITS), on_cpu(DEMO_MODEL)), engine.stats.spec_decoding
    accepted = stats.num_accepted_tokens if stats else 0
    rows.add("drafts, float32", different=different, accepted=accepted)
    return not different and accepted > 0


def states(rows: Rows, target: Target, folder: Path) -> bool:
    """Three of four layers keep a state, which the second time is found where the prompts end."""
    write_model("tiny-qwen3.5", folder)
    expected = on_cpu(folder)
    with running(folder, target, prefix_caching=True) as engine:
        different = sum(_different(engine.generate(PROMPTS, LIMITS), expected) for _ in range(2))
        hits = engine.stats.prefix_cache_hits
    rows.add("layers that keep a state, float32", different=different, found_in_cache=hits)
    return not different and hits > 0


def compiles(rows: Rows, target: Target, folder: Path) -> bool:
    """Kernels that Triton compiles until the engine is ready, and in random steps after that."""
    counts = [0]
    with _counting(counts), running(DEMO_MODEL, target, dtype=target.pick("bfloat16", "float32")) as engine:
        at_start = counts[0]
        rng = np.random.default_rng(0)
        for _ in range(target.pick(10, 2)):
            lengths = rng.integers(1, 60, rng.integers(1, 8))
            prompts = [rng.integers(50, 1900, length).tolist() for length in lengths]
            engine.generate(prompts, rng.integers(1, 12, len(prompts)).tolist(), temperature=0.7, top_p=0.9)
        in_service = counts[0] - at_start
    rows.add("kernels compiled", until_ready=at_start, in_service=in_service)
    return not in_service


@contextmanager
def _counting(counts: list[int]) -> Iterator[None]:
    """Count in ``counts[0]`` what Triton compiles, or reads of its cache, for the first time in this process."""
    import triton

    def count(*args: object, **kwargs: object) -> None:
        counts[0] += 1

    triton.knobs.runtime.jit_post_compile_hook = count  # type: ignore[assignment]
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def default_limits(rows: Rows, target: Target, folder: Path) -> bool:
    """As many requests and tokens in a step as there are by default on a GPU."""
    limits = gpu_defaults(SchedulerConfig(), ())
    count, budget = target.pick((limits["max_num_seqs"], limits["max_num_batched_tokens"]), (4, 128))
    prompts = [[(7 * index + place) % 1900 + 50 for place in range(budget // count)] for index in range(count)]
    options: dict[str, Any] = {"num_blocks": count * 8, "budget": budget, "max_num_seqs": count, "max_model_len": 128}
    with running(DEMO_MODEL, target, **options) as engine:
        found, most = engine.generate(prompts, [8] * count), engine.most_scheduled
    with running(DEMO_MODEL, Target(torch.device("cpu")), **options) as engine:
        different = _different(found, engine.generate(prompts, [8] * count))
    rows.add(f"default limits, {budget} tokens", requests=most, different=different)
    return most == count and not different


def libraries(rows: Rows, target: Target, folder: Path) -> bool:
    """Engines whose attention is that of a library, with graphs, in float16. As it rounds elsewhere, tokens that are
    nearly as likely may differ: one prompt of three may."""
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny-fp32"] | {"head_dim": 64}))
    right, options = True, {"dtype": target.pick("float16", "float32"), "load_format": "dummy"}
    with running(folder, target, **options) as engine:
        expected = engine.generate(PROMPTS, LIMITS)
    for name, library in LIBRARIES.items():
        if not target.has_gpu or not library.is_installed:
            rows.skip(f"attention by {name}, an engine", f"{library.distribution} is not installed, or there is no GPU")
            continue
        with running(folder, target, attention_backend=name, **options) as engine:
            different = _different(engine.generate(PROMPTS, LIMITS), expected)
        rows.add(f"attention by {name}, an engine", different=different)
        right &= different <= len(PROMPTS) // 2
    return right


def nccl(rows: Rows, target: Target, folder: Path) -> bool:
    """One rank: the library loads, and its calls take tensors of the device."""
    backend = _nccl(torch.distributed.FileStore(str(folder / "store"), 1), 0, 1, "")
    group, x = TorchGroup(backend, 0, 1), target.random(4, 6, dtype=torch.float32)
    right = torch.equal(group.all_reduce(x.clone()), x) and torch.equal(group.all_gather(x)[0], x)
    right &= torch.equal(group.all_max(x.clone()), x)
    group.gather_columns(x, out := torch.empty_like(x), width=6)
    right &= torch.equal(out, x)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    rows.add("NCCL, one rank", wrong=int(not right), version=version)
    return right


Check = Callable[[Rows, Target, Path], bool]
CHECKS: dict[str, Check] = {
    "sleep and wake": sleep,
    "quantized checkpoints": quantized,
    "weights as stored": stored_packed,
    "weights on the host": on_host,
    "experts": experts,
    "adapters": adapters,
    "drafts": drafts,
    "states": states,
    "default limits": default_limits,
    "kernels compiled": compiles,
    "attention of libraries": libraries,
    "NCCL": nccl,
}
