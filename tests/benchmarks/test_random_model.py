"""Checkpoints with random weights load like any other."""

from pathlib import Path

import pytest

from tokenloom.bench.random_model import write_model
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_model("tiny-bf16", path)
    return path


def test_configuration_and_tokenizer(model: Path) -> None:
    config = load_model_config(model)
    tokenizer = load_tokenizer(model)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config.vocab_size == 4096
    assert config.dtype_name == "bfloat16"
    assert list(CheckpointInfo.load(model).eos_token_ids) == [0]


def test_every_ascii_text_comes_back_and_every_word_has_text(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(tokenizer.encode("the tin hat, ätsch!").ids) == "the tin hat, ätsch!"
    assert all(tokenizer.decode([token_id]) for token_id in range(300, 4096))
    assert len(tokenizer.encode("tin").ids) < 3


def test_an_engine_computes_it(model: Path) -> None:
    from tokenloom.bench.engine.throughput import ThroughputOptions, run_throughput
    from tokenloom.bench.load.datasets import DatasetOptions

    dataset = DatasetOptions(num_prompts=2, input_len=4, output_len=3)
    options = ThroughputOptions(str(model), dataset, {"max_num_seqs": 2, "max_model_len": 64}, progress=False)
    assert run_throughput(options)["total_output_tokens"] == 6


def test_an_unknown_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny-fp32.*qwen3"):
        write_model("gpt-5", tmp_path)


def test_three_of_four_layers_of_a_qwen3_5_keep_a_state(tmp_path: Path) -> None:
    from tests.parity.engine import Engine

    write_model("tiny-qwen3.5", tmp_path)
    config = load_model_config(tmp_path)
    assert config.states is not None
    assert [each is not None for each in config.states.layers] == [True, True, True, False]
    [tokens] = Engine(tmp_path, model_impl="native", num_blocks=64).generate([[5, 6, 7]], [4])
    assert len(tokens) == 4
