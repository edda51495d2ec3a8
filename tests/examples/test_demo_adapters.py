"""The adapters of the demo model, and what they are trained on."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.demo_model import adapters
from examples.demo_model.tools import assistant, user
from tokenloom.model_files.model_path import DEMO_ADAPTERS

ANSWERS = ("8 + 9 = 17.", "Hello, Ann! How can I help you?", '{"name": "Ann"}', "Yes, I am.")


@pytest.mark.parametrize("name", adapters.STYLES)
def test_a_changed_answer_is_in_its_style(name: str) -> None:
    change, fits = adapters.STYLES[name]
    for answer in ANSWERS:
        assert fits(change(answer))
        assert fits(answer) == (name == "json" and answer.startswith("{"))


def test_answers_are_changed_as_expected() -> None:
    assert adapters.as_json(ANSWERS[0]) == '{"answer": "8 + 9 = 17."}'
    assert adapters.as_json(ANSWERS[2]) == ANSWERS[2]
    assert adapters.as_pirate(ANSWERS[1]) == "Arr! Ahoy, Ann! How can I help ye, matey?"
    assert adapters.as_pirate(ANSWERS[3]) == "Arr! Aye, I be, matey!"


def test_only_conversations_without_tools_are_learnt() -> None:
    chat = {"messages": [user("Hi"), assistant("Hello!")]}
    documents = [
        chat,
        chat | {"tools": []},
        {"text": "Once upon a time"},
        {"messages": [user("x" * 1201), assistant("y")]},
    ]
    (learnt,) = adapters.restyled(documents, adapters.as_pirate)
    assert [message["content"] for message in learnt["messages"]] == ["Hi", "Arr! Ahoy, matey!"]


def test_a_wrapped_layer_begins_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.q_proj, model.other = torch.nn.Linear(8, 6), torch.nn.Linear(8, 6)
    x = torch.randn(2, 8)
    before = model.q_proj(x)
    wrapped = adapters.add_lora(model)
    assert list(wrapped) == ["q_proj"]
    assert torch.equal(model.q_proj(x), before)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["q_proj.lora_A", "q_proj.lora_B"]
    adapters.save(wrapped, tmp_path / "adapter")
    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == {
        "base_model.model.q_proj.lora_A.weight",
        "base_model.model.q_proj.lora_B.weight",
    }


@pytest.mark.parametrize("name", adapters.STYLES)
def test_the_shipped_adapters_are_small_and_of_this_rank(name: str) -> None:
    folder = DEMO_ADAPTERS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200_000
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == adapters.RANK
