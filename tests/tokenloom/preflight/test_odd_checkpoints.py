"""A checkpoint that cannot be served is answered with one sentence, before a process starts."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.parity.reference import add_demo_tokenizer
from tests.parity.vision_checkpoints import write_vision
from tests.tokenloom.preflight.odd_checkpoints import CONFIG, ODD, Odd, good, safetensors
from tokenloom.cli.main import app
from tokenloom.cli.serve import serving
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.preflight.model import check_checkpoint
from tokenloom.preflight.small_files import CannotServe
from tokenloom.supervisor.mesh import MeshOutcome


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a mesh would have started")

    monkeypatch.setattr(serving, "run_mesh", fail)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_checkpoint_is_refused_in_one_sentence(odd: Odd, tmp_path: Path) -> None:
    path = good(tmp_path / "models" / "model")
    served = odd.change(path) or path
    result = CliRunner().invoke(app, ["serve", str(served)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert line.endswith(".")
    assert str(tmp_path) in line
    assert odd.file in line
    assert odd.way_out in line


def test_there_are_names_for_all_of_them() -> None:
    assert len(ODD) >= 30
    assert len({odd.name for odd in ODD}) == len(ODD)


def test_good_checkpoints_pass(tmp_path: Path) -> None:
    check_checkpoint(good(tmp_path / "model"))
    check_checkpoint(DEMO_MODEL)


def test_the_text_of_a_model_that_reads_images_is_checked_alike(tmp_path: Path) -> None:
    options = EngineConfig(worker=WorkerConfig(language_model_only=True))
    path = add_demo_tokenizer(write_vision("qwen3_vl", tmp_path, 2048))
    check_checkpoint(path, options)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["vocab_size"] = 2050
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CannotServe, match=r"model\.language_model\.embed_tokens\.weight is \[2048, 64\].*vocab_size 2050"
    ):
        check_checkpoint(path, options)
    small = add_demo_tokenizer(write_vision("llava", tmp_path, 503))
    with pytest.raises(CannotServe, match="says vocab_size 503: it is the tokenizer of another model"):
        check_checkpoint(small, options)


def test_files_of_torch_save_pass(tmp_path: Path) -> None:
    path = good(tmp_path / "model")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04rest")
    check_checkpoint(path)


def test_weights_without_the_usual_name_of_the_embeddings_pass(tmp_path: Path) -> None:
    path = good(tmp_path / "model")
    (path / "model.safetensors").write_bytes(safetensors([9, 9], "other.weight"))
    check_checkpoint(path)


@pytest.mark.parametrize("architectures", [None, ["LLaMAForCausalLM"]])
def test_a_known_type_stands_for_its_class(architectures: list[str] | None, tmp_path: Path) -> None:
    path = good(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": architectures}))
    check_checkpoint(path)


def test_shards_need_no_index_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = good(tmp_path / "model")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    with pytest.raises(CannotServe, match=r"not model-00002-of-00002\.safetensors: download the missing part"):
        check_checkpoint(path)
    (path / "model-00002-of-00002.safetensors").write_bytes(safetensors([2, 4], "model.norm.weight"))
    check_checkpoint(path)


def test_a_class_of_transformers_passes_only_where_its_modules_compute(tmp_path: Path) -> None:
    path = good(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}))
    assert check_checkpoint(path).by == "transformers"
    with pytest.raises(CannotServe, match="not built in: leave out --model-impl native"):
        check_checkpoint(path, EngineConfig(worker=WorkerConfig(model_impl="native")))


def test_without_transformers_the_answer_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = good(tmp_path / "model")
    config = (path / "config.json").read_text().replace("LlamaForCausalLM", "FalconForCausalLM")
    (path / "config.json").write_text(config.replace('"llama"', '"falcon"'))
    monkeypatch.setattr("tokenloom.gpu_worker.checkpoint.files.config_reader._auto_classes", lambda: "")
    with pytest.raises(CannotServe, match=r"transformers: pip install 'tokenloom\[transformers\]'"):
        check_checkpoint(path)


def test_a_model_that_is_untried_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = good(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}))
    monkeypatch.setattr("tokenloom.gpu_worker.checkpoint.module_types.transformers_types", lambda: None)
    monkeypatch.setattr(serving, "run_mesh", lambda *_: MeshOutcome(interrupted=True, clean=True))
    result = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert result.exit_code == 0, result.output
    assert f"Warning: {path} is untried with the installed transformers: the engine decides" in result.stderr
