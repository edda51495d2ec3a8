"""Tiny checkpoints of random weights in the layouts of published embedding models.

Names of files and entries are those of the published repositories that each layout names, in the form in which their
``config.json``, ``modules.json``, ``sentence_bert_config.json``, ``config_sentence_transformers.json`` and the folders
of their modules were on huggingface.co; the names of tensors are those that the classes of transformers save, or what
``transformers/conversion_mapping.py`` says of older files. Sizes, prompts and vocabularies are our own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.embeddings.layout_tokenizers import (
    bert,
    bert_of_128,
    gemma,
    llama,
    mpnet,
    qwen,
    roberta,
    t5,
    xlm_roberta,
)

HIDDEN = 32
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

Module = tuple[str, dict[str, Any]]


def pooling(mode: str, **entries: Any) -> Module:
    """Return a Pooling module in the form of files before version 6 of sentence-transformers."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    switches = {f"pooling_mode_{name}": name == mode for name in names}
    return "Pooling", {"word_embedding_dimension": HIDDEN, **switches, "include_prompt": True, **entries}


def dense(outputs: int, inputs: int = HIDDEN, activation: str = "linear.Identity", *, bias: bool = False) -> Module:
    kind = f"torch.nn.modules.{activation}"
    return "Dense", {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": kind}


NORMALIZE: Module = ("Normalize", {})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describes the files of one published repository.

    Attributes:
        repository: Whose files they are.
        model: The class of transformers that saves the tensors; empty: a static table.
        architecture: What ``config.json`` names; empty: ``model``.
        tokenizer: Saves a tokenizer of the kind that the repository has.
        config: Entries of ``config.json`` beside the sizes.
        modules: What follows the transformer.
        sentence: ``sentence_bert_config.json``; None: the repository has none.
        names: ``config_sentence_transformers.json``; None: the repository has none.
        prompts: Names to ask with, beside none.
        pickled: Whether the weights are a file of torch.save.
        renamed: Makes the names and tensors of the published file of those that the class saves.
    """

    repository: str
    model: str
    architecture: str = ""
    tokenizer: Callable[..., int]
    tokenizer_entries: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    modules: Sequence[Module]
    sentence: Mapping[str, Any] | None = None
    names: Mapping[str, Any] | None = None
    prompts: Sequence[str] = ()
    pickled: bool = False
    renamed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None

    def save(self, path: Path) -> None:
        """Write the files."""
        size = self.tokenizer(path, **self.tokenizer_entries)
        if self.model:
            self._save_model(path, size)
        else:
            self._save_table(path, size)
        for index, (kind, config) in enumerate(self.modules, 1):
            directory = path / f"{index}_{kind}"
            directory.mkdir()
            if kind != "Normalize":
                (directory / "config.json").write_text(json.dumps(config))
            if kind == "Dense":
                self._save_dense(directory, config)
        first = {"path": "", "type": "sentence_transformers.models.Transformer"}
        if not self.model:
            first = {"path": ".", "type": "sentence_transformers.models.StaticEmbedding"}
        listed: list[dict[str, Any]] = [{"idx": 0, "name": "0", **first}]
        for index, (kind, _) in enumerate(self.modules, 1):
            kept = {"idx": index, "name": str(index), "path": f"{index}_{kind}"}
            listed.append(kept | {"type": f"sentence_transformers.models.{kind}"})
        self._save_json(path / "modules.json", listed)
        self._save_json(path / "sentence_bert_config.json", self.sentence)
        self._save_json(path / "config_sentence_transformers.json", self.names)

    def _save_json(self, path: Path, content: Any) -> None:
        if content is not None:
            path.write_text(json.dumps(content, indent=2))

    def _save_model(self, path: Path, vocab_size: int) -> None:
        model_class = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**_SIZES | {"vocab_size": vocab_size} | self.config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(path)
        values = json.loads((path / "config.json").read_text())
        values["architectures"] = [self.architecture or self.model]
        (path / "config.json").write_text(json.dumps(values, indent=2))
        file = path / "model.safetensors"
        tensors = load_file(file)
        if self.renamed is not None:
            tensors = self.renamed(tensors)
            save_file(tensors, file, {"format": "pt"})
        if self.pickled:
            torch.save(tensors, path / "pytorch_model.bin")
            file.unlink()

    def _save_table(self, path: Path, vocab_size: int) -> None:
        torch.manual_seed(0)
        save_file({"embeddings": torch.randn(vocab_size, HIDDEN)}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"architectures": ["StaticModel"], **self.config}))

    def _save_dense(self, directory: Path, config: Mapping[str, Any]) -> None:
        tensors = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) / 4}
        if config["bias"]:
            tensors["linear.bias"] = torch.randn(config["out_features"]) / 4
        if self.pickled:
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})


_E5 = {"query": "query: ", "passage": "passage: "}
_INSTRUCT = {"query": "Instruct: find the passage\nQuery: ", "document": ""}
_GEMMA_PROMPTS = {"query": "task: find | query: ", "document": "title: none | text: ", "STS": "task: light | query: "}
_XLM_R = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1, "max_position_embeddings": 66}
_QWEN = {"num_key_value_heads": 2, "head_dim": 8, "max_window_layers": 2}
_MISTRAL = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": None}


def _nomic_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the names of nomic-embed-text-v1.5 (conversion_mapping.py, ``nomic_bert``)."""
    pairs = {
        "embeddings.LayerNorm": "emb_ln",
        "self_attn.o_proj": "attn.out_proj",
        "up_proj": "fc11",
        "gate_proj": "fc12",
        "down_proj": "fc2",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
    }
    found: dict[str, torch.Tensor] = {}
    joined: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            name = f"encoder.{name}"
        for new, old in pairs.items():
            name = name.replace(new, old)
        head, _, part = name.partition("self_attn.")
        if part:
            joined.setdefault(f"{head}attn.Wqkv.{part.rpartition('.')[2]}", {})[part[0]] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.cat([parts[each] for each in "qkv"]) for name, parts in joined.items()}


LAYOUTS: dict[str, Layout] = {
    "minilm": Layout(
        repository="sentence-transformers/all-MiniLM-L6-v2",
        model="BertModel",
        tokenizer=bert_of_128,
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 24, "do_lower_case": False},
        names={"__version__": {"sentence_transformers": "2.0.0"}},
    ),
    "mpnet": Layout(
        repository="sentence-transformers/all-mpnet-base-v2",
        model="MPNetModel",
        architecture="MPNetForMaskedLM",
        tokenizer=mpnet,
        config={"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 66},
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 32, "do_lower_case": False},
    ),
    "distilroberta": Layout(
        repository="sentence-transformers/all-distilroberta-v1",
        model="RobertaModel",
        architecture="RobertaForMaskedLM",
        tokenizer=roberta,
        config=_XLM_R,
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 48, "do_lower_case": False},
    ),
    "distilbert": Layout(
        repository="sentence-transformers/msmarco-distilbert-base-v4",
        model="DistilBertModel",
        tokenizer=bert,
        config={"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        modules=[pooling("mean_tokens")],
        sentence={"max_seq_length": 40, "do_lower_case": True},
        tokenizer_entries={"do_lower_case": False},
    ),
    "bge": Layout(
        repository="BAAI/bge-small-en-v1.5",
        model="BertModel",
        tokenizer=bert,
        modules=[pooling("cls_token"), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": True},
        names={"prompts": {"query": "find the passage for this query: "}},
        prompts=["query"],
    ),
    "bge-m3": Layout(
        repository="BAAI/bge-m3",
        model="XLMRobertaModel",
        tokenizer=xlm_roberta,
        config=_XLM_R,
        modules=[pooling("cls_token"), NORMALIZE],
        sentence={"max_seq_length": 60, "do_lower_case": False},
        pickled=True,
    ),
    "e5": Layout(
        repository="intfloat/e5-small-v2",
        model="BertModel",
        tokenizer=bert,
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 40, "do_lower_case": False},
        names={"prompts": _E5, "default_prompt_name": "query"},
        prompts=["query", "passage", "document"],
    ),
    "multilingual-e5": Layout(
        repository="intfloat/multilingual-e5-large",
        model="XLMRobertaModel",
        tokenizer=xlm_roberta,
        config=_XLM_R,
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": False},
        names={"prompts": _E5, "default_prompt_name": None},
        prompts=["passage"],
    ),
    "gte": Layout(
        repository="thenlper/gte-base",
        model="BertModel",
        tokenizer=bert,
        modules=[pooling("mean_tokens"), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": False},
    ),
    "gte-qwen2": Layout(
        repository="Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        model="Qwen2Model",
        architecture="Qwen2ForCausalLM",
        tokenizer=qwen,
        config={"num_key_value_heads": 2, "is_causal": False, "tie_word_embeddings": False},
        modules=[pooling("lasttoken"), NORMALIZE],
        sentence={"max_seq_length": 60, "do_lower_case": False},
        names={"prompts": _INSTRUCT, "default_prompt_name": None, "similarity_fn_name": None},
        prompts=["query"],
    ),
    "nomic": Layout(
        repository="nomic-ai/nomic-embed-text-v1.5",
        model="NomicBertModel",
        tokenizer=bert,
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        modules=[pooling("mean_tokens")],
        sentence={"max_seq_length": 64, "do_lower_case": False},
        renamed=_nomic_names,
    ),
    "arctic": Layout(
        repository="Snowflake/snowflake-arctic-embed-m-v1.5",
        model="BertModel",
        tokenizer=bert,
        modules=[pooling("cls_token"), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": False},
        names={"prompts": {"query": "find in this text: "}, "default_prompt_name": None},
        prompts=["query"],
    ),
    "jina-v3": Layout(
        repository="jinaai/jina-embeddings-v3-hf",
        model="JinaEmbeddingsV3Model",
        tokenizer=xlm_roberta,
        config={"pad_token_id": 1, "type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2},
        modules=[pooling("mean_tokens"), NORMALIZE],
    ),
    "gte-modernbert": Layout(
        repository="Alibaba-NLP/gte-modernbert-base",
        model="ModernBertModel",
        tokenizer=bert,
        tokenizer_entries={"tokenizer_class": "PreTrainedTokenizerFast"},
        config={"local_attention": 8, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3},
        modules=[pooling("cls_token")],
        sentence={"max_seq_length": 64, "do_lower_case": False},
    ),
    "embeddinggemma": Layout(
        repository="google/embeddinggemma-300m",
        model="Gemma3TextModel",
        tokenizer=gemma,
        config={
            "num_key_value_heads": 1,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": True,
        },
        modules=[pooling("mean_tokens"), dense(48), dense(HIDDEN, 48), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": False},
        names={
            "model_type": "SentenceTransformer",
            "prompts": _GEMMA_PROMPTS,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        prompts=["query", "document", "STS"],
    ),
    "qwen3-embedding": Layout(
        repository="Qwen/Qwen3-Embedding-8B",
        model="Qwen3Model",
        architecture="Qwen3ForCausalLM",
        tokenizer=qwen,
        config=_QWEN | {"tie_word_embeddings": False},
        modules=[pooling("lasttoken"), NORMALIZE],
        names={"prompts": _INSTRUCT, "default_prompt_name": None, "similarity_fn_name": "cosine"},
        prompts=["query", "document"],
    ),
    "e5-mistral": Layout(
        repository="intfloat/e5-mistral-7b-instruct",
        model="MistralModel",
        tokenizer=llama,
        config=_MISTRAL,
        modules=[pooling("lasttoken"), NORMALIZE],
        sentence={"max_seq_length": 60, "do_lower_case": False},
        names={"prompts": {"web_search_query": "Instruct: find the text\nQuery: "}, "default_prompt_name": None},
        prompts=["web_search_query"],
    ),
    "sfr": Layout(
        repository="Salesforce/SFR-Embedding-Mistral",
        model="MistralModel",
        tokenizer=llama,
        config=_MISTRAL | {"rope_theta": 10000.0},
        modules=[pooling("lasttoken"), NORMALIZE],
        sentence={"max_seq_length": 64, "do_lower_case": False},
    ),
    "labse": Layout(
        repository="sentence-transformers/LaBSE",
        model="BertModel",
        tokenizer=bert,
        tokenizer_entries={"do_lower_case": False},
        modules=[pooling("cls_token"), dense(HIDDEN, activation="activation.Tanh", bias=True), NORMALIZE],
        sentence={"max_seq_length": 40, "do_lower_case": False},
        pickled=True,
    ),
    "sentence-t5": Layout(
        repository="sentence-transformers/sentence-t5-base",
        model="T5EncoderModel",
        tokenizer=t5,
        config={"d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_positions": 512},
        modules=[pooling("mean_tokens"), dense(24), NORMALIZE],
        sentence={"max_seq_length": 40, "do_lower_case": False},
    ),
    "static": Layout(
        repository="minishlab/potion-base-8M",
        model="",
        tokenizer=bert,
        config={"model_type": "model2vec", "hidden_dim": HIDDEN, "seq_length": 1000000, "normalize": True},
        modules=[NORMALIZE],
    ),
    "instructed": Layout(
        repository="a model whose prompts take no part in the vector (include_prompt false)",
        model="BertModel",
        tokenizer=bert,
        modules=[
            (
                "Pooling",
                {
                    "embedding_dimension": HIDDEN,
                    "pooling_mode": ["mean", "max", "weightedmean"],
                    "include_prompt": False,
                },
            ),
            NORMALIZE,
            dense(20, 3 * HIDDEN),
        ],
        sentence={"max_seq_length": 30, "do_lower_case": False},
        names={"prompts": _E5, "default_prompt_name": "passage"},
        prompts=["query"],
    ),
}
"""The layouts by short names."""

TEXTS = (
    "The old ship sails over the red sea.",
    "a cat",
    " ",
    "Find the light in the harbour for this ship, over the sea of the night: " * 4,
)
"""What is embedded; the last is longer than every limit."""
