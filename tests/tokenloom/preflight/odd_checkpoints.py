"""Checkpoints as users have them by mistake: what was done to a good one, and what the answer must name."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
WEB_PAGE = "<!DOCTYPE html><html><body>404</body></html>"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 4} | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate("abcdefgh")}, "merges": []}}


def safetensors(shape: list[int], name: str = "model.embed_tokens.weight", offsets: list[Any] | None = None) -> bytes:
    size = 4 * shape[0] * shape[1]
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": offsets or [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def gguf(architecture: str = "llama", *, tokens: bool = True, kind: str = "model") -> bytes:
    entries = {"general.architecture": architecture, "general.type": kind}
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries) + tokens)
    for key, value in entries.items():
        content += _text(key) + struct.pack("<I", 8) + _text(value)
    if tokens:
        content += _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + _text("a")
    content += _text("token_embd.weight") + struct.pack("<I", 2) + struct.pack("<2Q", 4, 8) + struct.pack("<IQ", 0, 0)
    return content + bytes(-len(content) % 32) + bytes(128)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def good(path: Path) -> Path:
    """Write a checkpoint that passes every check."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(safetensors([8, 4]))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return path


@dataclass(frozen=True)
class Odd:
    """One mistake."""

    name: str
    change: Callable[[Path], Any]
    """Turns the good checkpoint in a directory ``model`` into the odd one; may return another path to serve."""
    file: str
    """What the answer names."""
    way_out: str


def dense_layer(weights: Any = None) -> Callable[[Path], None]:
    """Add the files of sentence-transformers with a layer after the pooling."""

    def change(path: Path) -> None:
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
        listed = [{"path": name, "type": f"sentence_transformers.models.{kind}"} for name, kind in kinds.items()]
        (path / "modules.json").write_text(json.dumps(listed))
        for name in ("1_Pooling", "2_Dense"):
            (path / name).mkdir()
            (path / name / "config.json").write_text("{}")
        if weights is not None:
            write("2_Dense/model.safetensors", weights)(path)

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        values = {name: value for name, value in (CONFIG | changes).items() if value is not None}
        (path / "config.json").write_text(json.dumps(values))

    return change


def architecture(name: str, **changes: Any) -> Callable[[Path], None]:
    return config(architectures=[name], **changes)


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def only(name: str, content: str | bytes = "x") -> Callable[[Path], None]:
    """Leave nothing but one file."""

    def change(path: Path) -> None:
        shutil.rmtree(path)
        path.mkdir()
        write(name, content)(path)

    return change


def without(*names: str, then: Callable[[Path], Any] | None = None) -> Callable[[Path], Any]:
    def change(path: Path) -> Any:
        for name in names:
            (path / name).unlink()
        return then(path) if then else None

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:size])

    return change


def beside(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """Serve a file next to the directory instead."""

    def change(path: Path) -> Path:
        file = path.with_name(name)
        write(name, content)(path.parent)
        return file

    return change


def link(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(path.parent / "blobs" / "4d7a")

    return change


SHARDS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
INDEX = "model.safetensors.index.json"
NO_WEIGHTS = without("model.safetensors")

ODD = [
    Odd("nothing", lambda path: path.with_name("nowhere"), "nowhere", "give a checkpoint directory"),
    Odd("empty", without("config.json", "model.safetensors", "tokenizer.json"), "model is empty", "hf download"),
    Odd("parent", lambda path: path.parent, "", "serve"),
    Odd("cache of a hub", lambda path: shutil.move(path, path.parent / "snapshots") and path.parent, "", "snapshots"),
    Odd("only GGUF", only("model-q4.gguf", gguf()), "model", "serve one of its GGUF files, model-q4.gguf"),
    Odd("text files", only("README.md"), "no config.json", "give a checkpoint directory"),
    Odd("a file of weights", lambda path: path / "model.safetensors", "model.safetensors", "serve its directory"),
    Odd("an archive", beside("model.zip", b"PK\x03\x04rest"), "model.zip", "give a checkpoint directory"),
    Odd("Ollama's blob", beside("sha256-4d7a", gguf()), "sha256-4d7a", "ln -s"),
    Odd("Ollama's manifest", beside("latest", '{"layers": []}'), "latest", "serve the GGUF blob"),
    Odd(
        "adapter",
        only("adapter_config.json", '{"base_model_name_or_path": "a/b"}'),
        "adapter_config.json",
        "lora-modules",
    ),
    Odd(
        "adapter with the base's config",
        without("model.safetensors", then=write("adapter_config.json", "{}")),
        "adapter_config.json",
        "serve that model with --enable-lora",
    ),
    Odd("diffusers", only("model_index.json", "{}"), "model_index.json", "give a checkpoint directory"),
    Odd("ONNX", without("model.safetensors", then=write("onnx/model.onnx", "x")), "model.onnx", "safetensors"),
    Odd("TensorFlow", without("model.safetensors", then=write("tf_model.h5", "x")), "tf_model.h5", "safetensors"),
    Odd("Flax", without("model.safetensors", then=write("flax_model.msgpack", "x")), "flax_model", "safetensors"),
    Odd("of the authors", only("consolidated.00.pth"), "consolidated.00.pth", "format of transformers"),
    Odd("static table", only("0_StaticEmbedding/tokenizer.json", "{}"), "0_StaticEmbedding", "as model2vec saves it"),
    Odd(
        "code in modules",
        write("modules.json", '[{"path": "", "type": "custom_st.Transformer"}]'),
        "modules.json",
        "the module custom_st.Transformer is not supported",
    ),
    Odd("DeepSpeed", only("zero_to_fp32.py"), "DeepSpeed", "run zero_to_fp32.py"),
    Odd("FSDP", only("__0_0.distcp"), "__0_0.distcp", "merge-weights"),
    Odd(
        "training state", without("model.safetensors", then=write("trainer_state.json", "{}")), "trainer_state", "save_"
    ),
    Odd("config as a page", write("config.json", WEB_PAGE), "config.json holds a web page", "hf download"),
    Odd("config cut off", write("config.json", '{"architectures": ['), "config.json is not JSON", "download"),
    Odd("config nested deeply", write("config.json", "[" * 100_000), "config.json is not JSON", "download"),
    Odd("config as a list", write("config.json", "[]"), "config.json must hold a JSON object", "download"),
    Odd("config in another encoding", write("config.json", b"\xff\xfe{}"), "config.json", "download"),
    Odd("config as a pointer", write("config.json", POINTER), "config.json is a git-lfs pointer", "git lfs pull"),
    Odd("config as a dead link", link("config.json"), "config.json is a link", "download the model again"),
    Odd(
        "no class",
        config(architectures=None, model_type=None),
        "config.json",
        "architectures must name the model's class, such as LlamaForCausalLM",
    ),
    Odd(
        "vision",
        architecture("LlavaNextForConditionalGeneration"),
        "config.json",
        "text alone with --language-model-only",
    ),
    Odd("other vision", architecture("MllamaForConditionalGeneration"), "config.json", "ForCausalLM"),
    Odd("encoder", architecture("FunnelForMaskedLM"), "config.json", "fills gaps"),
    Odd("classifier", architecture("ElectraForSequenceClassification"), "config.json", "classifies texts"),
    Odd("embeddings", architecture("FunnelModel"), "config.json", "embeddings"),
    Odd("translation", architecture("T5ForConditionalGeneration", is_encoder_decoder=True), "config.json", "encoder"),
    Odd(
        "code in it",
        architecture("OddForCausalLM", auto_map={"AutoModel": "odd.py"}),
        "auto_map",
        "docs/reference/models.md",
    ),
    Odd("unknown class", architecture("OddForCausalLM", model_type="odd"), "OddForCausalLM", "newer transformers"),
    Odd("unknown method", config(quantization_config={"quant_method": "exl3"}), "'exl3'", "unquantized checkpoint"),
    Odd("MLX", config(quantization={"bits": 4}), "MLX", "GGUF"),
    Odd("weights cut off", cut("model.safetensors", 200), "model.safetensors is cut off", "download it again"),
    Odd("header cut off", cut("model.safetensors", 20), "model.safetensors", "download it again"),
    Odd("weights empty", cut("model.safetensors", 0), "model.safetensors is empty", "download"),
    Odd("weights as a page", write("model.safetensors", WEB_PAGE), "model.safetensors holds a web page", "hf download"),
    Odd("weights as a pointer", write("model.safetensors", POINTER), "model.safetensors", "git lfs pull"),
    Odd("weights as a dead link", link("model.safetensors"), "model.safetensors is a link", "download"),
    Odd("noise as weights", write("model.safetensors", b"\x05\0\0\0\0\0\0\0{abc}"), "model.safetensors", "download"),
    *(
        Odd(name, write("model.safetensors", safetensors([8, 4], offsets=offsets)), "model.safetensors", "download")
        for name, offsets in {
            "offsets that descend": [128, 0],
            "an offset before the file": [-1000, 128],
            "three offsets": [0, 64, 128],
            "an offset that is no integer": [0.5, 128],
        }.items()
    ),
    Odd("no weights", NO_WEIGHTS, "no weights", "download model.safetensors"),
    Odd(
        "other name",
        lambda path: (path / "model.safetensors").rename(path / "m.safetensors") and None,
        "m.safe",
        "rename",
    ),
    Odd("a shard missing", without("model.safetensors", then=write(INDEX, json.dumps(SHARDS))), INDEX, "missing"),
    Odd("an index without a map", without("model.safetensors", then=write(INDEX, "{}")), INDEX, "weight_map"),
    Odd("an index as a page", without("model.safetensors", then=write(INDEX, WEB_PAGE)), INDEX, "hf download"),
    Odd("unfinished", write("model.safetensors.aria2", "x"), "aria2", "finish it"),
    Odd(
        "old pickle",
        without("model.safetensors", then=write("pytorch_model.bin", b"\x80\x02l")),
        "model.bin",
        "convert",
    ),
    Odd("weights of another model", config(vocab_size=9), "model.safetensors", "from the same checkpoint"),
    Odd("module without weights", dense_layer(), "2_Dense", "download it again"),
    Odd("module as a pointer", dense_layer(POINTER), "2_Dense", "git lfs pull"),
    Odd("no tokenizer", without("tokenizer.json"), "no tokenizer.json", "copy the file"),
    Odd("slow tokenizer", without("tokenizer.json", then=write("tokenizer.model", "x")), "tokenizer.model", "save_pre"),
    Odd("tokenizer as a pointer", write("tokenizer.json", POINTER), "tokenizer.json", "git lfs pull"),
    Odd("tokenizer without a model", write("tokenizer.json", "{}"), "tokenizer.json", "copy the file"),
    Odd(
        "tokenizer of another model",
        write("tokenizer.json", json.dumps({"model": {"vocab": {"z": 8}}})),
        "tokenizer.json",
        "tokenizer of another model",
    ),
    Odd(
        "unknown GGUF",
        beside("m.gguf", gguf("rwkv7")),
        "m.gguf: general.architecture 'rwkv7'",
        "safetensors checkpoint",
    ),
    Odd("GGUF adapter", beside("m.gguf", gguf(kind="adapter")), "m.gguf", "peft library"),
    Odd("GGUF of images", beside("m.gguf", gguf("clip")), "m.gguf", "serve the file of the language model"),
    Odd("GGUF without tokenizer", beside("m.gguf", gguf(tokens=False)), "m.gguf", "with its tokenizer"),
    Odd("GGUF cut off", beside("m.gguf", gguf()[:60]), "m.gguf", "download it again"),
    Odd("GGUF in parts", beside("m-00001-of-00002.gguf", gguf()), "m-00001-of-00002.gguf", "missing: download it too"),
    Odd("GGUF as a pointer", beside("m.gguf", POINTER), "m.gguf", "git lfs pull"),
    Odd("another file as GGUF", beside("m.gguf", b"ggjt" + bytes(64)), "m.gguf", "download it again"),
]
