"""Whole models on a device whose tensors no kernel of the host may read: PyTorch computes what the host computes."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS, FORMATS
from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tests.gpu_worker.models.test_models import MODELS, SaveCheckpoint
from tests.gpu_worker.platform.cuda_tensors import CUDA, CudaTensor, on_cuda
from tests.gpu_worker.platform.device_platform import ApartPlatform
from tests.parity.engine import Engine, uni
from tests.parity.reference import save_random
from tokenloom import demo_adapters
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig, SpeculativeConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import FloatWeight, QuantizedWeight
from tokenloom.gpu_worker.layers import linear, triton_linear, weight_memory
from tokenloom.gpu_worker.layers.weight_memory import is_on_host, tensors_of
from tokenloom.gpu_worker.model_slot import ModelSlot
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.models.model import LanguageModel
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.model_files.model_path import DEMO_MODEL

__all__ = ("on_cuda",)
CPU = torch.device("cpu")
ADAPTER = Path(demo_adapters.__file__).parent / "pirate"


@torch.inference_mode()
def compute(path: Path, device: torch.device, dtype: str = "bfloat16") -> Tensor:
    """Return the logits [2, vocab] behind a prompt of 20 tokens and one token with 40 before it."""
    return logits_of(load_model(path, dtype, device, make_ops("torch", device)), device)


@torch.inference_mode()
def logits_of(model: LanguageModel, device: torch.device) -> Tensor:
    backend = make_attention_backend("torch", model.config, 16, device)
    caches = backend.allocate(8)
    tables = np.array([[0, 1, 7], [2, 3, 4]], dtype=np.int32)
    slots = np.append(np.arange(20), 4 * 16 + 8).astype(np.int64)
    starts = np.array([0, 20, 21], dtype=np.int32)
    plan = backend.plan(starts, np.array([20, 41], dtype=np.int32), tables, slots)
    ids, positions = (torch.tensor([*range(30, 50), 7]).to(device), torch.tensor([*range(20), 40]).to(device))
    hidden = model.forward(ids, positions, caches, plan)
    return model.compute_logits(hidden[torch.tensor([19, 20]).to(device)])


def same(path: Path, plain: Path, device: torch.device) -> None:
    """Check that a GPU computes a quantized model as one whose weights are those numbers."""
    found, expected = compute(path, device), compute(plain, CPU)
    assert isinstance(found, CudaTensor)
    torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.15)


@pytest.mark.parametrize("name", FORMATS)
def test_stored_quantized_weights_are_read_by_no_kernel_of_the_host(
    name: str, tmp_path: Path, on_cuda: torch.device
) -> None:
    same(*formats.write(tmp_path / "model", *FORMATS[name]), on_cuda)


@pytest.mark.parametrize(
    ("name", "stay"),
    [
        ("compressed fp8, by channel", True),
        ("compressed fp8, by tensor", True),
        ("fp8, by tensor", True),
        ("compressed fp8, by block", False),
        ("fp8, by block", False),
        ("w4a16", False),
    ],
)
def test_stored_8_bit_floats_stay_so_on_a_gpu_that_multiplies_them(
    name: str, stay: bool, tmp_path: Path, on_cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are rounded too, as for weights that are rounded at load."""
    made = list[linear.Fp8Linear]()
    make = linear.Fp8Linear
    monkeypatch.setattr(linear, "computes_fp8", lambda device: True)
    monkeypatch.setattr(linear, "Fp8Linear", lambda *arguments: made.append(make(*arguments)) or made[-1])
    quantized, plain = formats.write(tmp_path / "model", *FORMATS[name])
    found, expected = compute(quantized, on_cuda).cpu(), compute(plain, CPU)
    num_layers = load_model(plain, "bfloat16", CPU, make_ops("torch", CPU)).config.num_layers
    assert len(made) == (4 * num_layers if stay else 0), "QKV, output, gates and up, down"
    assert all(layer.stored[0].element_size() == 1 and layer.stored[0].device == CUDA for layer in made)
    assert (found - expected).norm() / expected.norm() < (0.1 if stay else 0.02)


class KeptGroups:
    """Stands in for ``GroupedLinear``, whose kernels read no such tensors: notes what it gets, and multiplies."""

    made: ClassVar[list[tuple[QuantizedWeight | FloatWeight, torch.device]]] = []

    def __init__(self, weight: QuantizedWeight | FloatWeight, bias: Tensor | None, device: torch.device) -> None:
        self.made.append((weight, device))
        if isinstance(weight, FloatWeight):
            groups = torch.arange(weight.values.shape[1]) // weight.group
            plain = weight.values.float() * weight.scales[:, groups]
        else:
            plain = weight.dequantize()
        self._plain = linear.PlainLinear(plain.bfloat16().to(device), bias)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain(x, dtype)


@pytest.mark.parametrize(
    ("name", "stay"),
    [
        ("gptq", True),
        ("gptq, zero points", True),
        ("gptq, 8 bits, one group", False),
        ("gptq, order of activations", False),
        ("awq", True),
        ("w4a16", True),
        ("w4a16, zero points", True),
        ("w8a8", False),
        ("compressed fp8, by block", True),
        ("fp8, by block", True),
    ],
)
def test_stored_groups_stay_so_on_a_gpu_with_triton(
    name: str, stay: bool, tmp_path: Path, on_cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptGroups, "made", [])
    monkeypatch.setattr(linear, "uses_triton", lambda device: device.type == "cuda")
    monkeypatch.setattr(linear, "computes_fp8", lambda device: True)
    monkeypatch.setattr(triton_linear, "GroupedLinear", KeptGroups)
    monkeypatch.setattr(triton_linear, "TritonLinear", linear.PlainLinear)
    quantized, plain = formats.write(tmp_path / "model", *FORMATS[name])
    found, expected = compute(quantized, on_cuda).cpu(), compute(plain, CPU)
    num_layers = load_model(plain, "bfloat16", CPU, make_ops("torch", CPU)).config.num_layers
    assert len(KeptGroups.made) == (4 * num_layers if stay else 0), "QKV, output, gates and up, down"
    assert all(weight.values.device == CPU and device == CUDA for weight, device in KeptGroups.made)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.15)


def test_weights_of_layers_stay_on_the_host_as_far_as_there_is_room(
    tmp_path: Path, on_cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sleep does not move them, nor do they come back to the GPU after it."""
    moved = list[int]()
    monkeypatch.setattr(
        weight_memory, "memory_on_bus", lambda memory, device: moved.append(memory.nbytes) or memory.to(device)
    )
    path, room = save_random("qwen3", tmp_path), 100_000
    loader = ModelLoader("float32", on_cuda, make_ops("torch", on_cuda), host_room=room)
    slot = ModelSlot(path, loader)
    on_host = [each for each in tensors_of(slot.model) if is_on_host(each)]
    assert sum(moved) == sum(each.nbytes for each in on_host)
    assert 0.5 * room < sum(moved) <= room
    assert all(isinstance(each, CudaTensor) and each.dim() >= 2 for each in on_host)
    all_bytes = sum(each.nbytes for each in tensors_of(slot.model))
    assert slot.move_to_host() == all_bytes - sum(moved)
    slot.restore()
    assert [id(each) for each in tensors_of(slot.model) if is_on_host(each)] == [id(each) for each in on_host]
    moved.clear()
    slot.replace(path)
    assert 0.5 * room < sum(moved) <= room, "other weights take the same room"
    plain = load_model(path, "float32", on_cuda, make_ops("torch", on_cuda))
    assert torch.equal(logits_of(slot.model, on_cuda), logits_of(plain, on_cuda))


def test_inputs_that_a_checkpoint_does_not_round_are_not_rounded(
    tmp_path: Path, on_cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "computes_fp8", lambda device: True)
    monkeypatch.setattr(linear, "Fp8Linear", None)
    quantize, config = FORMATS["compressed fp8, by channel"]
    (group,) = config["config_groups"].values()
    config = config | {"config_groups": {"group_0": group | {"input_activations": None}}}
    same(*formats.write(tmp_path / "model", quantize, config), on_cuda)


@pytest.mark.parametrize("name", EXPERTS)
def test_stored_quantized_experts(name: str, tmp_path: Path, on_cuda: torch.device) -> None:
    sizes = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    source = save_random("qwen3_moe", tmp_path, **sizes)
    same(*formats.write(tmp_path / "model", *EXPERTS[name], source=source), on_cuda)


def test_experts_of_4_bit_floats(tmp_path: Path, on_cuda: torch.device) -> None:
    found = compute(write_gpt_oss(tmp_path), on_cuda, "float32")
    assert isinstance(found, CudaTensor)
    torch.testing.assert_close(found.cpu(), compute(tmp_path, CPU, "float32"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_file(kind: Kind, tmp_path: Path, on_cuda: torch.device) -> None:
    write_demo(tmp_path / "demo.gguf", kind)
    found = compute(tmp_path / "demo.gguf", on_cuda)
    assert isinstance(found, CudaTensor)
    # The host rounds inputs to 8 bits where a GPU does not.
    torch.testing.assert_close(found.cpu(), compute(tmp_path / "demo.gguf", CPU), rtol=0.1, atol=1.0)


@pytest.mark.parametrize("name", {model_type: name for name, (model_type, _) in MODELS.items()}.values())
def test_a_model_gives_the_logits_of_the_host(
    name: str, save_checkpoint: SaveCheckpoint, on_cuda: torch.device
) -> None:
    model_type, entries = MODELS[name]
    path = save_checkpoint(model_type, **entries)
    found = compute(path, on_cuda, "float32")
    assert isinstance(found, CudaTensor)
    torch.testing.assert_close(found.cpu(), compute(path, CPU, "float32"), rtol=1e-4, atol=1e-4)


def test_such_a_tensor_is_what_the_driver_would_refuse(on_cuda: torch.device) -> None:
    x, host = torch.ones(2, 3, device=on_cuda), torch.ones(2, 3)
    assert (x.device, (x + 1).device, x[:1].t().device, x.new_empty(2).device) == (CUDA,) * 4
    assert x.cpu().device == x.to("cpu").device == CPU
    assert (x * torch.tensor(2.0))[0, 0] == 2.0
    for mix in (lambda: x + host, lambda: torch.cat([host, x]), lambda: host[x.long()]):
        with pytest.raises(RuntimeError):
            mix()
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(AssertionError):
        x.data_ptr()
    host.copy_(x * 3)
    assert host[0, 0] == 3.0
    assert type(host) is torch.Tensor


class FakeGPU(ApartPlatform):
    """Has such tensors, and nothing that Triton computes: the host draws."""

    device = CUDA

    def make_sampler(self) -> None:  # type: ignore[override]
        return None


def on_gpu(config: EngineConfig) -> Executor:
    return UniProcExecutor(ModelWorker(config, FakeGPU()))


PROMPTS = [[50, 300, 301, 302, 303] * 8, list(range(60, 80)), [7]]
LIMITS = [12] * len(PROMPTS)
SMALL = {"num_blocks": 64, "max_num_seqs": 4, "budget": 64, "max_model_len": 128}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"budget": 16},
    "drafts from the prompt": {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
    "drafts of a model": {
        "speculative": SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model=str(DEMO_MODEL))
    },
    "adapters": {"lora": LoraConfig(enable=True, modules=(f"pirate={ADAPTER}",))},
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gives_the_hosts_tokens(name: str, on_cuda: torch.device) -> None:
    found, options = [], ENGINES[name]
    for executor in (on_gpu, uni):
        engine = Engine(DEMO_MODEL, executor=executor, attention_backend="torch", **(SMALL | options))
        adapters = engine.core.adapters
        digests = [] if adapters is None else [state.digest for state in adapters.answer().adapters]
        chosen = [*digests, *[b""] * (len(PROMPTS) - len(digests))]
        found.append(engine.generate(PROMPTS, LIMITS, adapters=chosen))
        found.append(engine.generate(PROMPTS, LIMITS, temperature=0.8, presence_penalty=0.5))
        engine.core.shutdown()
    assert found[:2] == found[2:]
