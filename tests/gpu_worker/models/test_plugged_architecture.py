"""Architectures of plugins: read as a built-in class of other names, or computed by a class of their own."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tokenloom import LLM, LoRARequest, SamplingParams
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models import model
from tokenloom.gpu_worker.models.load_model import ModelLoader
from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL

BIRCH = f"{EXAMPLE_NAME}:BirchForCausalLM"
PROMPTS = [[100 + 7 * index, *range(200, 230 + index)] for index in range(4)]
LOW = 600
OAK = f"""
from tokenloom.gpu_worker.models.decoder import DecoderModel

class Oak(DecoderModel):
    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        logits[:, :{LOW}] = float("-inf")
        return logits

class Yew:
    def __init__(self, checkpoint, config, ops, device, stage):
        self.config = config
        checkpoint.skip_below("")

def broken(*arguments):
    raise KeyError("a layer")

OAK = {{"like": "Qwen3ForCausalLM", "model": Oak}}
YEW = {{"like": "Qwen3ForCausalLM", "model": Yew}}
ELM = {{"like": "Qwen3ForCausalLM", "model": broken}}
ASH = {{"like": "Qwen3ForCausalLM", "layers": 4}}
FIR = {{"like": "FirForCausalLM"}}
"""


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("packages")
    install_example(directory)
    names = {f"{name.title()}ForCausalLM": f"acme_trees:{name.upper()}" for name in ("oak", "yew", "elm", "ash", "fir")}
    install(directory, "acme-trees", {"tokenloom.model_architectures": names}, OAK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield directory


def write(path: Path, architecture: str, **entries: Any) -> Path:
    """The demo model as a class of another name would have saved it."""
    path.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"architectures": [architecture]}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    if architecture == "BirchForCausalLM":
        config |= {"width": config.pop("hidden_size"), "depth": config.pop("num_hidden_layers"), "model_type": "birch"}
        del config["attention_bias"]
        tensors = {name.replace("model.", "trunk.").replace(".self_attn.", ".attention."): tensor
                   for name, tensor in tensors.items()}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config | entries))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def birch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "birch", "BirchForCausalLM")


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., LLM]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made: list[LLM] = []

    def make(path: Path, **options: Any) -> LLM:
        options = {"max_model_len": 256, "num_gpu_blocks_override": 64, "max_num_seqs": 8, **options}
        made.append(LLM(path, dtype="float32", **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    torch.set_num_threads(threads)


def tokens(llm: LLM, **params: Any) -> list[list[int]]:
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, **params)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, asked, use_tqdm=False)]


def test_a_class_of_other_names_computes_the_same(make: Callable[..., LLM], birch: Path) -> None:
    """Chosen by the class that its files name. Its tokens stay the same over a sleep, which reads the files again."""
    built_in = make(DEMO_MODEL)
    plugged = make(birch, plugins=[EXAMPLE_NAME])
    expected = tokens(built_in)
    assert tokens(plugged) == expected
    plugged.sleep()
    plugged.wake_up()
    assert tokens(plugged) == expected
    numerics = built_in._client.ready.numerics
    assert plugged._client.ready.numerics == f"{numerics}/{BIRCH}/plugin-{EXAMPLE_NAME}-0.1.0"


def test_it_is_divided_among_workers(birch: Path, make: Callable[..., LLM], packages: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(packages))
        two = make(birch, plugins=[EXAMPLE_NAME], model_impl=BIRCH, tensor_parallel_size=2)
        found = tokens(two)
    assert found == tokens(make(DEMO_MODEL))


def test_a_class_of_its_own_computes_the_model(make: Callable[..., LLM], tmp_path: Path) -> None:
    plugged = make(write(tmp_path / "oak", "OakForCausalLM"), plugins=["acme-trees"])
    built_in = make(DEMO_MODEL)
    expected = tokens(built_in, allowed_token_ids=list(range(LOW, 2048)))
    assert tokens(plugged) == expected != tokens(built_in)


def test_weights_of_a_class_of_its_own_stay_on_the_host_where_it_loads_layers_as_built_in_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = list[object]()
    monkeypatch.setattr(model, "keep_on_host", lambda layer, room: moved.append(layer) or 100)
    loader = ModelLoader("float32", plugins=["acme-trees"], host_room=1000)
    oak = replace(loader, model_impl="acme-trees:OakForCausalLM").load(write(tmp_path / "oak", "OakForCausalLM"))
    assert len(moved) == oak.config.num_layers
    yew = replace(loader, model_impl="acme-trees:YewForCausalLM")
    path = write(tmp_path / "yew", "YewForCausalLM")
    with pytest.raises(
        ValueError, match=r"cpu_offload_gb: the class of the plugin acme-trees:YewForCausalLM leaves no"
    ):
        yew.load(path)
    replace(yew, host_room=0).load(path)


def adapter(path: Path, name: str) -> LoRARequest:
    """An adapter of the demo model, with the names that a training of BirchForCausalLM gives it. One layer has another
    scaling, by a pattern of its name there."""
    path.mkdir()
    config = json.loads((DEMO_ADAPTERS / name / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"trunk.layers.1.attention.q_proj": 24}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(DEMO_ADAPTERS / name / "adapter_model.safetensors")
    for part, other in (("base_model.model.model.", "base_model.model.trunk."), (".self_attn.", ".attention.")):
        tensors = {key.replace(part, other): tensor for key, tensor in tensors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest(name, path)


def built_in(path: Path, name: str) -> LoRARequest:
    """The same with the demo model's names."""
    path.mkdir()
    config = json.loads((DEMO_ADAPTERS / name / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"model.layers.1.self_attn.q_proj": 24}
    (path / "adapter_config.json").write_text(json.dumps(config))
    weights = "adapter_model.safetensors"
    (path / weights).write_bytes((DEMO_ADAPTERS / name / weights).read_bytes())
    return LoRARequest(name, path)


def test_adapters_have_the_names_of_its_own_checkpoint(make: Callable[..., LLM], birch: Path, tmp_path: Path) -> None:
    own = [built_in(tmp_path / f"built-in-{name}", name) for name in ("json", "pirate")]
    theirs = [adapter(tmp_path / name, name) for name in ("json", "pirate")]
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    expected = adapted(make(DEMO_MODEL, **lora), [*own, None, own[0]])
    plugged = make(birch, plugins=[EXAMPLE_NAME], **lora)
    assert adapted(plugged, [*theirs, None, theirs[0]]) == expected
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    assert expected[0] != adapted(plugged, [None])[0]
    plugged.sleep()
    plugged.wake_up()
    assert adapted(plugged, [*theirs, None, theirs[0]]) == expected


def adapted(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = PROMPTS[: len(requests)]
    outputs = llm.generate(prompts, asked, use_tqdm=False, lora_request=requests)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_class_of_its_own_has_adapters_too(make: Callable[..., LLM], tmp_path: Path) -> None:
    own = built_in(tmp_path / "json", "json")
    plugged = make(write(tmp_path / "oak", "OakForCausalLM"), plugins=["acme-trees"], enable_lora=True)
    found = adapted(plugged, [own])
    assert min(found[0]) >= LOW
    assert found != adapted(plugged, [None])


def test_a_head_drafts_for_it(make: Callable[..., LLM], birch: Path) -> None:
    assert drafted(make(birch, plugins=[EXAMPLE_NAME], speculative_config=EAGLE)) == story(make(DEMO_MODEL))


def test_a_head_drafts_for_a_class_of_its_own(make: Callable[..., LLM], tmp_path: Path) -> None:
    path, plugins = write(tmp_path / "oak", "OakForCausalLM"), ["acme-trees"]
    assert drafted(make(path, plugins=plugins, speculative_config=EAGLE)) == story(make(path, plugins=plugins))


EAGLE = {"method": "eagle", "model": str(DEMO_MODEL / "eagle"), "num_speculative_tokens": 3}


def story(llm: LLM) -> list[list[int]]:
    """What the model has learned to tell, and nonsense."""
    asked = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(["Once upon a time there was a little", "The dog and the cat"], asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs] + tokens(llm)


def drafted(llm: LLM) -> list[list[int]]:
    """The same of an engine that drafts; some of its drafts were accepted."""
    drafts = llm._client._core.scheduler.drafts
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    found = story(llm)
    counts = llm._client._core.scheduler.stats().spec_decoding
    assert counts is not None
    assert counts.num_accepted_tokens > 0
    return found


def answer(path: Path, plugins: tuple[str, ...] = (EXAMPLE_NAME,), **options: Any) -> str:
    worker = {name: options.pop(name) for name in WorkerConfig.__struct_fields__ if name in options}
    config = EngineConfig(worker=WorkerConfig(model=str(path), **worker), plugins=plugins, **options)
    return served_how(config, has_gpu=False).by


def test_checks_before_a_start_import_nothing(birch: Path, tmp_path: Path) -> None:
    import sys

    sys.modules.pop("acme_trees", None)
    assert answer(birch) == answer(birch, model_impl=BIRCH) == "plugin"
    assert answer(write(tmp_path / "fir", "FirForCausalLM"), ("acme-trees",)) == "plugin"
    assert "acme_trees" not in sys.modules


MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"plugins": ()}, "BirchForCausalLM"),
        ({"load_format": "dummy"}, "load_format dummy makes weights for the built-in architectures"),
        ({"batch_invariant": True}, "architectures of plugins may follow the batch"),
        ({"speculative": MTP}, "the method mtp reads the head in the files of built-in architectures"),
        ({"model_impl": "acme-trees:OakForCausalLM", "plugins": ("acme-trees",)}, "is of the class BirchForCausalLM"),
    ],
)
def test_what_is_not_possible_is_refused_before_weights_are_read(
    birch: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        answer(birch, **options)


def test_a_context_that_only_the_plugin_reads_is_checked_by_the_engine(make: Callable[..., LLM], birch: Path) -> None:
    with pytest.raises(ValueError, match="the model's context has 2048 tokens"):
        make(birch, plugins=[EXAMPLE_NAME], max_model_len=4096)


def test_a_built_in_class_stays_built_in(make: Callable[..., LLM], packages: Path) -> None:
    own = {"tokenloom.model_architectures": {"Qwen3ForCausalLM": "acme_qwen:Q", "BirchForCausalLM": "acme_qwen:Q"}}
    install(packages, "acme-qwen", own, 'Q = {"like": "LlamaForCausalLM"}')
    assert answer(DEMO_MODEL, ("acme-qwen",)) == "built in"
    assert answer(DEMO_MODEL, ("acme-qwen",), model_impl="acme-qwen:Qwen3ForCausalLM") == "plugin"


def test_two_plugins_for_one_class_are_refused(birch: Path, packages: Path) -> None:
    install(packages, "acme-wood", {"tokenloom.model_architectures": {"BirchForCausalLM": "acme_wood:B"}})
    with pytest.raises(ValueError, match=r"both compute .*: name one of them with --model-impl"):
        answer(birch, (EXAMPLE_NAME, "acme-wood"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Elm", r"the plugin acme-trees:ElmForCausalLM \(model_architectures\): KeyError: 'a layer'"),
        ("Ash", "is no architecture: Object contains unknown field `layers`"),
        ("Fir", "like must be one of LlamaForCausalLM.*, not 'FirForCausalLM'"),
    ],
)
def test_a_plugin_that_makes_no_model_is_named(tmp_path: Path, name: str, reason: str) -> None:
    path = write(tmp_path / name, f"{name}ForCausalLM")
    loader = ModelLoader("float32", model_impl=f"acme-trees:{name}ForCausalLM", plugins=("acme-trees",))
    with pytest.raises(ValueError, match=reason):
        loader.load(path)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"hidden_size": 256}, "state an entry twice"),
        ({"depth": "four"}, 'num_hidden_layers must be a positive integer, found "four"'),
        ({"twist": 3}, "not supported: twist = 3"),
    ],
)
def test_entries_are_checked_as_those_of_the_built_in_class(
    tmp_path: Path, entries: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "odd", "BirchForCausalLM", **entries)
    loader = ModelLoader("float32", model_impl=BIRCH, plugins=(EXAMPLE_NAME,))
    with pytest.raises(ValueError, match=reason):
        loader.read_config(path)
