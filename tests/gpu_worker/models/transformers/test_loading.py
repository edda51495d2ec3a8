"""Loading checkpoints into transformers' modules."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.gpu_worker.conftest import RunModel, SaveCheckpoint
from tokenloom.gpu_worker.checkpoint.served_how import choose
from tokenloom.gpu_worker.models import transformers as transformers_package
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.ops.cpu_ops import make_ops


def test_models_are_loaded_one_after_the_other(
    save_checkpoint: SaveCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes its classes while it loads; two loads at the same time would leave them so."""
    path = save_checkpoint("gpt2")
    both_load = threading.Barrier(2)
    load = transformers.GPT2LMHeadModel.from_pretrained

    def wait_for_the_other(*args: Any, **named: Any) -> Any:
        both_load.wait(timeout=0.5)
        return load(*args, **named)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", wait_for_the_other)
    with ThreadPoolExecutor(2) as pool:
        loads = [
            pool.submit(load_model, path, ops=make_ops("auto", torch.device("cpu")), model_impl="transformers")
            for _ in range(2)
        ]
    for each in loads:
        with pytest.raises(ValueError, match="BrokenBarrierError"):
            each.result()


def write(path: Path, **entries: Any) -> Path:
    (path / "config.json").write_text(json.dumps(entries))
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"]},
            r"config.json: architectures names NoSuchForCausalLM, which neither",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "code.OwnForCausalLM"}},
            "whose code is in the checkpoint .auto_map.; code of checkpoints is never run",
        ),
        ({"architectures": ["pipeline"]}, "architectures names pipeline, which neither"),
        ({"architectures": ["ElectraForMaskedLM"], "model_type": "electra"}, "is not a causal language model"),
        ({"architectures": []}, "architectures must name the model's class"),
        (
            {"architectures": ["PhiForCausalLM"], "model_type": "phi", "quantization_config": {"quant_method": "hqq"}},
            "quant_method 'hqq' is not supported .gptq, awq",
        ),
        (
            {
                "architectures": ["PhiForCausalLM"],
                "model_type": "phi",
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "quantization_config is mxfp4, which transformers' modules do not compute here",
        ),
        (
            {"architectures": ["PhiForCausalLM"], "model_type": "phi", "dtype": "float32"},
            "no weights in a format",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **{"dtype": "float32", **entries})
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_code_of_a_checkpoint_is_not_run_although_its_class_is_built_in(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    auto_map = {"AutoConfig": "code.PhiConfig", "AutoModelForCausalLM": "code.PhiForCausalLM"}
    path = write(tmp_path, architectures=["PhiForCausalLM"], model_type="phi", dtype="float32", auto_map=auto_map)
    assert ModelLoader().read_config(path).num_layers == 24
    assert "code" not in sys.modules or not str(sys.modules["code"].__file__).startswith(str(tmp_path))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delattr(transformers_package, "transformers_model", raising=False)
    for name in [name for name in sys.modules if ".gpu_worker.models.transformers." in name]:
        monkeypatch.delitem(sys.modules, name)
    path = write(tmp_path, architectures=["PhiForCausalLM"], dtype="float32")
    with pytest.raises(ValueError, match=r'pip install "tokenloom\[transformers\]"'):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "model_impl", "expected"),
    [
        ("LlamaForCausalLM", "auto", "built in"),
        ("LlamaForCausalLM", "native", "built in"),
        ("LlamaForCausalLM", "transformers", "transformers"),
        ("BartForCausalLM", "auto", "transformers"),
        ("BertModel", "auto", "encoder"),
    ],
)
def test_which_code_computes_a_model(name: str, model_impl: str, expected: str, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8)
    more = {"num_attention_heads": 2, "max_position_embeddings": 8, "dtype": "float32"}
    assert choose(write(tmp_path, architectures=[name], **sizes, **more), model_impl=model_impl).by == expected


def test_native_refuses_what_is_not_built_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PhiForCausalLM is not built in: leave out --model-impl native"):
        load_model(write(tmp_path, architectures=["PhiForCausalLM"]), model_impl="native")


@pytest.mark.parametrize("kind", ["granite", "gpt_oss"])  # the second with one tensor for all experts of a layer
@torch.inference_mode()
def test_parts_need_no_index(kind: str, save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    def load() -> Any:
        return load_model(path, "float32", model_impl="transformers")

    path, prompt = save_checkpoint(kind, max_shard_size="60KB", pad_token_id=0), torch.arange(20)
    [expected] = run_model(load(), [prompt], [[20]])
    (path / "model.safetensors.index.json").unlink()
    assert len(list(path.glob("*.safetensors"))) > 1
    [found] = run_model(load(), [prompt], [[20]])
    assert torch.equal(found, expected)
    last = max(path.glob("*.safetensors"))
    last.unlink()
    with pytest.raises(ValueError, match=f"not {last.name}: download the missing part"):
        load()
