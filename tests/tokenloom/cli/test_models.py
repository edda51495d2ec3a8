"""``tokenloom models``."""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tests.parity.vision_checkpoints import write_vision
from tests.tokenloom.cli.fake_server import FakeServer
from tests.tokenloom.gguf.demo_file import add_tokenizer, write_metadata
from tokenloom.cli.main import app
from tokenloom.cli.models import checkpoints
from tokenloom.model_files.model_path import DEMO_MODEL


def test_what_a_server_lists(server: FakeServer) -> None:
    rows = [{"id": "demo", "max_model_len": 2048, "owned_by": "tokenloom"}]
    server.reply(200, {"data": rows})
    arguments = ["models", "--base-url", server.url]
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout) == rows
    assert CliRunner().invoke(app, arguments).stdout.split()[-3:] == ["demo", "2048", "tokenloom"]


def test_local_checkpoints_and_what_is_none(tmp_path: Path) -> None:
    for name, config in (("good", '{"architectures": ["LlamaForCausalLM"]}'), ("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text("{}")
    found = list(checkpoints([tmp_path]))
    assert [(each.id, each.path) for each in found[:2]] == [
        ("tokenloom-demo", str(DEMO_MODEL)),
        ("tokenloom-picture", str(DEMO_MODEL / "picture")),
    ]
    (good,) = [each for each in found if each.path.startswith(str(tmp_path))]
    assert (good.id, good.architecture, good.bytes) == (str(tmp_path / "good"), "LlamaForCausalLM", 4)
    assert (found[0].served, found[0].reason) == ("built in", "")
    assert good.served == "refused"
    assert "not a valid safetensors file" in good.reason


def test_a_model_that_reads_images_is_listed_with_the_option_for_its_text(tmp_path: Path) -> None:
    path = write_vision("llava_next", tmp_path, architectures=None)
    (found,) = [each for each in checkpoints([tmp_path]) if each.path == str(path)]
    assert found.architecture == "LlavaNextForConditionalGeneration"
    assert (found.served, found.reason, found.options) == ("built in", "", "--language-model-only")
    table = CliRunner().invoke(app, ["models", "--local", "--folder", str(tmp_path)], env={"COLUMNS": "300"}).stdout
    assert "built in (--language-model-only)" in table


def test_local_gguf_files(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "demo.gguf", add_tokenizer)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (found,) = [each for each in checkpoints([tmp_path]) if each.path.startswith(str(tmp_path))]
    assert (found.id, found.architecture, found.bytes) == (str(path), "qwen3", path.stat().st_size)


def test_a_model_in_several_files_is_listed_once(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo.gguf", Kind.Q8_0, add_tokenizer, tensors_in_a_file=20)
    (found,) = [each for each in checkpoints([tmp_path]) if each.path.startswith(str(tmp_path))]
    parts = sorted(tmp_path.iterdir())
    assert (found.id, found.served) == (str(parts[0]), "built in")
    assert found.bytes == sum(part.stat().st_size for part in parts) > parts[0].stat().st_size
    parts[1].unlink()
    assert not [each for each in checkpoints([tmp_path]) if each.path.startswith(str(tmp_path))]


@pytest.mark.parametrize("columns", ["20", "200"])
def test_the_table_has_the_demo_model(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = CliRunner().invoke(app, ["models", "--local"])
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("tokenloom-demo ")]
    assert row.rstrip().endswith(str(DEMO_MODEL))  # the other model has a longer path


@pytest.mark.parametrize("name", ["[/INST]", "m[v2]", "[fd00::1]:9000", ":smile:", "[bold]x[/]"])
def test_cells_are_no_markup(server: FakeServer, name: str) -> None:
    server.reply(200, {"data": [{"id": name, "max_model_len": 1, "owned_by": name}]})
    result = CliRunner().invoke(app, ["models", "--base-url", server.url])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split() == [name, "1", name]


@pytest.mark.parametrize("answer", [{}, {"data": None}, {"data": {"id": "x"}}, {"data": ["x"]}, {"data": [[]]}])
def test_what_lists_no_models_is_a_failure(server: FakeServer, answer: object) -> None:
    server.reply(200, answer)
    result = CliRunner().invoke(app, ["models", "--base-url", server.url])
    assert result.exit_code == 1
    assert "no list of models" in result.stderr


@pytest.mark.parametrize("config", ['{"architectures": {"a": 1}}', '{"architectures": 5}', "[" * 100_000, '"text"'])
def test_a_strange_checkpoint_is_none(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert not [each for each in checkpoints([tmp_path]) if each.path.startswith(str(tmp_path))]


def test_templates_are_described(tmp_path: Path) -> None:
    family = Path(__file__).parents[2] / "services/tokenizer/families/glm4_5.jinja"
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    arguments = ["models", "--template", str(family), "--template", str(silent), "--template", str(DEMO_MODEL)]
    glm, none, demo = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (glm["format"]["syntax"], glm["same_as"], glm["source"]) == ("pairs", "glm45", "derived")
    assert glm["reasoning"] == ["<think>", "</think>"]
    assert none == {"template": str(silent), "problem": "the name of a call is not written"}
    assert demo["same_as"] == "hermes"
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert "same_as      glm45" in lines
    assert "problem      the name of a call is not written" in lines


def test_a_template_that_begins_calls_as_an_entry_shows_what_differs(tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    family = Path(__file__).parents[2] / "services/tokenizer/families/qwen2_5.jinja"
    other.write_text(family.read_text().replace('"arguments": ', '"parameters": '))
    (row,) = json.loads(CliRunner().invoke(app, ["models", "--template", str(other), "--json"]).stdout)
    assert row["differs"]["entry"] == "hermes"
    assert "parameters" in row["differs"]["after_name"]
