"""Measures the experts of gpt-oss-20b's layers as they are published (MXFP4) next to the same in bfloat16.

``python -m tokenloom.bench.engine.quantization.mxfp4_experts`` computes layers of that shape, more than a cache holds,
in turns: for one row it prints which share of the memory's speed the reading of the row's experts takes, and how many
times bfloat16's speed that is. With ``OMP_NUM_THREADS=1`` it measures CPU time, which other processes hardly change.
``--model`` writes models of a few such layers to a temporary folder and measures their decode steps with one stream,
next to the ratio of the bytes that a step reads.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenloom.gpu_worker.checkpoint.files.quantized_weight import Float4Weight
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.layers.quantized_experts import QuantizedExperts
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows, mix_experts

from ..bandwidth import read_bandwidth
from ..decode_step import DecodeOptions, run_decode

HIDDEN, INNER, PER_TOKEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 2880, 2880, 4, 64, 8, 64, 4096
"""Of openai/gpt-oss-20b, but for the vocabulary, whose output layer would hide the layers."""
_ACTIVATION = "clamped_swiglu"
_BYTES = {"MXFP4": 4.25 / 8, "bfloat16": 2.0}
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def _blocks(outputs: int, inputs: int, *experts: int) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (*experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 122, blocks.shape[:-1], dtype=torch.uint8)


def packed_experts(count: int) -> Experts:
    """Make the experts of a layer in MXFP4."""

    def layer(outputs: int, inputs: int) -> QuantizedLinear:
        blocks, exponents = _blocks(outputs, inputs)
        return QuantizedLinear(Float4Weight(blocks.flatten(1), exponents), torch.zeros(outputs))

    experts = QuantizedExperts.of([(layer(2 * INNER, HIDDEN), layer(HIDDEN, INNER)) for _ in range(count)], _ACTIVATION)
    assert experts is not None
    return experts


def plain_experts(count: int) -> Experts:
    """Make the experts of a layer in bfloat16."""
    ops = make_ops("auto", torch.device("cpu"))

    def weight(outputs: int, inputs: int) -> Tensor:
        return (torch.randn(outputs, inputs) * 0.02).bfloat16()

    layers = [(make_linear(weight(2 * INNER, HIDDEN)), make_linear(weight(HIDDEN, INNER))) for _ in range(count)]

    def compute(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        def one(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = layers[expert]
            return down(ops.gated(gate_up, rows, _ACTIVATION))

        return mix_experts(x, GroupedRows.sort(chosen), weights, one)

    return compute


def bandwidth() -> float:
    """Return the bytes a second that the threads read; of one thread by its CPU time, as :func:`run` counts it."""
    if (threads := torch.get_num_threads()) > 1:
        return read_bandwidth(threads)
    numbers, least = torch.ones(1 << 27, dtype=torch.int64), float("inf")
    for _ in range(5):
        started = time.thread_time()
        numbers.sum()
        least = min(least, time.thread_time() - started)
    return numbers.nbytes / least


def run(layers: dict[str, list[Experts]], count: int, rows: int, rounds: int) -> dict[str, float]:
    """Return the least seconds of one layer, by kind; the kinds take turns."""
    x = torch.randn(rows, HIDDEN).bfloat16()
    least = dict.fromkeys(layers, float("inf"))
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time
    for _ in range(rounds):
        for kind, each in layers.items():
            routes = [torch.randn(rows, count).softmax(-1).topk(PER_TOKEN, dim=-1) for _ in each]
            started = clock()
            for experts, (weights, chosen) in zip(each, routes, strict=True):
                experts(x, weights, chosen)
            least[kind] = min(least[kind], (clock() - started) / len(each))
    return least


def write_model(path: Path, num_layers: int, count: int, *, packed: bool) -> Path:
    """Write a random model of such layers, in the published layout or with experts in bfloat16."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_local_experts": count,
        "num_experts_per_tok": PER_TOKEN,
        "max_position_embeddings": 131_072,
    } | ({"quantization_config": {"quant_method": "mxfp4"}} if packed else {})

    def plain(*shape: int) -> Tensor:
        return (torch.randn(*shape) * 0.02).bfloat16()

    tensors = {f"{name}.weight": plain(VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    attention = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}
    shapes = {name: (size, HIDDEN) for name, size in attention.items()} | {"o_proj": (HIDDEN, HEADS * HEAD)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{at}.self_attn.{name}.weight"], tensors[f"{at}.self_attn.{name}.bias"] = (
                plain(*shape),
                plain(shape[0]),
            )
        tensors[f"{at}.self_attn.sinks"] = plain(HEADS)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        tensors[f"{at}.mlp.router.weight"], tensors[f"{at}.mlp.router.bias"] = plain(count, HIDDEN), plain(count)
        for name, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            stored = f"{at}.mlp.experts.{name}"
            tensors[f"{stored}_bias"] = plain(count, outputs)
            if packed:
                tensors[f"{stored}_blocks"], tensors[f"{stored}_scales"] = _blocks(outputs, inputs, count)
            else:
                tensors[stored] = plain(count, inputs, outputs)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def step_bytes(kind: str, num_layers: int) -> float:
    """Return the bytes of weights that a step of one stream reads."""
    attention = HIDDEN * HEAD * (2 * HEADS + 2 * KV_HEADS) * 2
    return num_layers * (attention + PER_TOKEN * 3 * HIDDEN * INNER * _BYTES[kind]) + 2 * VOCABULARY * HIDDEN


def run_models(num_layers: int, count: int) -> None:
    """Print the decode step of both models, and the ratios of time and of bytes."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in _BYTES:
            path = write_model(Path(folder) / kind, num_layers, count, packed=kind == "MXFP4")
            (row,) = run_decode(DecodeOptions(path, batches=(1,), context=64)).rows
            seconds[kind] = row["step_ms"] / 1e3
    ratio = seconds["bfloat16"] / seconds["MXFP4"]
    of_bytes = step_bytes("bfloat16", num_layers) / step_bytes("MXFP4", num_layers)
    steps = "; ".join(f"{kind} {each * 1e3:.2f} ms" for kind, each in seconds.items())
    print(f"a step: {steps}: {ratio:.2f} times as fast, {ratio / of_bytes:.2f} of the ratio of bytes, {of_bytes:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer; the published model has 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", action="store_true", help="measure whole decode steps instead")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.model:
        run_models(options.layers, options.experts)
        return
    with torch.inference_mode():
        makers = {"MXFP4": packed_experts, "bfloat16": plain_experts}
        layers = {kind: [make(options.experts) for _ in range(options.layers)] for kind, make in makers.items()}
        read = bandwidth()
        print(f"ms a layer; this machine reads {read / 1e9:.1f} GB/s")
        for rows in options.rows:
            least = run(layers, options.experts, rows, options.rounds)
            line = "; ".join(f"{kind} {seconds * 1e3:.2f}" for kind, seconds in least.items())
            share = PER_TOKEN * 3 * HIDDEN * INNER * _BYTES["MXFP4"] / least["MXFP4"] / read
            of_one = f", reading experts at {share:.0%} of that" if rows == 1 else ""
            print(f"{rows} rows: {line}: {least['bfloat16'] / least['MXFP4']:.2f} times as fast{of_one}", flush=True)


if __name__ == "__main__":
    main()
