"""What the files of sentence-transformers say about texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity.embeddings.layouts import LAYOUTS
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.sentence_texts import SentenceTexts, read_modules, read_sentence_texts

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def write(path: Path, modules: Any = (TRANSFORMER, POOLING), **files: Any) -> Path:
    """Write JSON files by their names without an ending; ``pooling`` is that of the pooling module."""
    (path / "1_Pooling").mkdir(exist_ok=True)
    if (dense := files.pop("dense", None)) is not None:
        (path / "2_Dense").mkdir()
        (path / "2_Dense" / "config.json").write_text(json.dumps(dense))
        modules = [*modules, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (path / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        file = path / (f"{name}.json" if name != "pooling" else "1_Pooling/config.json")
        file.write_text(json.dumps(content))
    return path


def test_no_files(tmp_path: Path) -> None:
    assert read_modules(tmp_path) is None
    assert read_sentence_texts(tmp_path) is None


def test_defaults(tmp_path: Path) -> None:
    assert read_sentence_texts(write(tmp_path)) == SentenceTexts({"query": "", "document": ""})


def test_all_entries(tmp_path: Path) -> None:
    texts = read_sentence_texts(
        write(
            tmp_path,
            pooling={"pooling_mode_mean_tokens": True, "include_prompt": False},
            sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
            config_sentence_transformers={
                "prompts": {"query": "q: ", "clustering": "c: "},
                "default_prompt_name": "query",
            },
            tokenizer_config={"truncation_side": "left", "model_max_length": 5},
        )
    )
    prompts = {"query": "q: ", "document": "", "clustering": "c: "}
    assert texts == SentenceTexts(prompts, "query", 12, keeps_first=False, lowers=True, pools_prompt=False)
    assert [texts.prompt(name) for name in ("", "query", "document", "clustering")] == ["q: ", "q: ", "", "c: "]
    with pytest.raises(ValueError, match="the model's prompts are: clustering, document, query"):
        texts.prompt("passage")


@pytest.mark.parametrize(
    ("tokenizer", "config", "most"),
    [
        ({}, {}, 0),
        ({"model_max_length": 1e30}, {"max_position_embeddings": 40}, 40),
        ({"model_max_length": 30}, {"max_position_embeddings": 40}, 30),
        ({"model_max_length": 30}, {"max_position_embeddings": -1}, 30),
    ],
)
def test_limit_without_max_seq_length(
    tmp_path: Path, tokenizer: dict[str, Any], config: dict[str, Any], most: int
) -> None:
    path = write(tmp_path, tokenizer_config=tokenizer, config=config, sentence_bert_config={"max_seq_length": None})
    texts = read_sentence_texts(path)
    assert texts is not None
    assert texts.max_tokens == most


def test_older_name_of_the_settings(tmp_path: Path) -> None:
    texts = read_sentence_texts(write(tmp_path, sentence_roberta_config={"max_seq_length": 7}))
    assert texts is not None
    assert texts.max_tokens == 7


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": [{**TRANSFORMER, "type": "custom_st.Transformer"}]}, "the module custom_st.Transformer"),
        ({"modules": [{**TRANSFORMER, "path": "0_Transformer"}]}, "the transformer is in the folder 0_Transformer"),
        ({"modules": [POOLING]}, "the module sentence_transformers.models.Pooling is not supported"),
        ({"modules": [TRANSFORMER, TRANSFORMER]}, "the module sentence_transformers.models.Transformer"),
        ({"modules": []}, "lists no modules"),
        ({"modules": {"0": TRANSFORMER}}, "modules.json must hold a JSON list"),
        ({"modules": [{"path": ""}]}, "must list objects with type and path"),
        ({"pooling": {"pooling_mode": 3}}, "1_Pooling/config.json: pooling modes are cls, .*, not 3"),
        ({"config_sentence_transformers": {"prompts": ["query: "]}}, "prompts must be an object"),
        ({"config_sentence_transformers": {"prompts": {"query": 3}}}, "the prompt query must be a text"),
        ({"sentence_bert_config": {"max_seq_length": "512"}}, "max_seq_length must be a positive integer, not '512'"),
        ({"sentence_bert_config": {"max_seq_length": -1}}, "max_seq_length must be a positive integer, not -1"),
        ({"sentence_bert_config": {"model_args": 3}}, "model_args must be an object"),
        ({"sentence_bert_config": {"modality_config": {"text": "x"}}}, "modality_config for text"),
        (
            {"modules": [TRANSFORMER, {**POOLING, "type": "sentence_transformers.models.Dense"}]},
            "Dense before the pool",
        ),
        (
            {"pooling": {"pooling_mode": ["mean", "median"]}},
            "1_Pooling/config.json: pooling modes are cls, .*, not median",
        ),
        (
            {"dense": {"activation_function": "torch.nn.Softmax"}},
            "activation function torch.nn.Softmax is not supported",
        ),
        ({"dense": {"module_input_name": "token_embeddings"}}, "module_input_name must be sentence_embedding"),
        ({"config_sentence_transformers": {"model_type": "SparseEncoder"}}, "model_type SparseEncoder"),
        ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name 'q' is none"),
        ({"sentence_bert_config": {"transformer_task": "fill-mask"}}, "transformer_task fill-mask"),
        ({"sentence_bert_config": {"model_args": {"num_hidden_layers": 2}}}, "model_args: num_hidden_layers"),
        ({"sentence_bert_config": {"modality_config": {"text": {"method": "get_text"}}}}, "modality_config for text"),
    ],
)
def test_what_would_change_vectors_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_sentence_texts(write(tmp_path, **files))


def test_a_cross_encoder_has_no_vectors(tmp_path: Path) -> None:
    assert read_modules(write(tmp_path, config_sentence_transformers={"model_type": "CrossEncoder"})) is None


def test_arguments_without_an_effect_are_accepted(tmp_path: Path) -> None:
    settings = {"model_args": {"trust_remote_code": True, "attn_implementation": "sdpa"}, "unpad_inputs": None}
    assert read_sentence_texts(write(tmp_path, sentence_bert_config=settings)) is not None


@pytest.mark.parametrize(("name", "lowers"), [("distilbert", True), ("labse", False)])
def test_texts_in_lower_case(tmp_path: Path, name: str, lowers: bool) -> None:
    """Both tokenizers distinguish cases; ``sentence_bert_config.json`` of the first one asks for lower case."""
    LAYOUTS[name].save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.encode("THE Ship").ids == tokenizer.encode("the ship").ids) == lowers


def test_the_length_in_the_tokenizer_file_does_not_count(tmp_path: Path) -> None:
    LAYOUTS["minilm"].save(tmp_path)
    assert '"truncation":null' not in (tmp_path / "tokenizer.json").read_text().replace(" ", "")
    tokenizer = load_tokenizer(tmp_path)
    assert [len(tokenizer.encode(text).ids) for text in ("a cat", "a cat " * 20)] == [4, 42]
