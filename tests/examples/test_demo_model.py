"""The generator of the demo model's text, and the checkpoint that came of it."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.demo_model import acceptance, evaluate, generate, questions, stories, tools, train
from tokenloom.model_files.model_path import DEMO_MODEL


def test_the_same_seed_writes_the_same_text() -> None:
    first, second = (list(generate.training_documents(random.Random(3), 50)) for _ in range(2))
    assert first == second


def test_no_held_out_question_is_trained_on() -> None:
    trained = {m["content"] for d in generate.training_documents(random.Random(1), 400) for m in d.get("messages", [])}
    held_out = [d for d in generate.evaluation_documents(random.Random(2), 2) if generate.is_held_out(d)]
    assert len(held_out) > 20
    assert all(generate.is_held_out({"messages": [tools.user(d["messages"][0]["content"])]}) for d in held_out[:5])
    assert not trained & {d["messages"][-2]["content"] for d in held_out if len(d["messages"]) == 2}


@pytest.mark.parametrize("kind", questions.MAKERS)
def test_questions_and_answers_are_finished_text(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        for text in questions.MAKERS[kind][0](rng):
            assert text
            assert text == text.strip()
            assert not re.search(r"[\[\]|]|\{[a-z]\w*\}|  ", text), text


def test_sums_are_right() -> None:
    for maker in (questions.make_sum, questions.make_difference):
        left, right = maker(random.Random(5))[1].rstrip(".").split(" = ")
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_stories_tell_of_their_topic_and_have_more_than_one_plot() -> None:
    told = {topic: stories.story(random.Random(1), topic) for topic in stories.topics()}
    assert all(topic in text for topic, text in told.items())
    favourites = {stories._plot_of(topic, random.Random(1)) for topic in stories.topics()}
    assert len(favourites) > 5


def test_a_tool_call_uses_the_names_of_the_schema() -> None:
    for seed in range(50):
        document = tools.tool_chat(random.Random(seed), "tool_call")
        call = document["messages"][1]["tool_calls"][0]["function"]
        (schema,) = [t["function"] for t in document["tools"] if t["function"]["name"] == call["name"]]
        assert list(call["arguments"]) == schema["parameters"]["required"]


def test_only_the_assistants_turns_are_learnt() -> None:
    ids, labels = train.pack([([1, 2, 3, 4], [False, False, True, True]), ([5, 6], [False, True])], 5)
    assert ids.tolist() == [[1, 2, 3, 4, 5]]
    assert labels.tolist() == [[-100, 3, 4, -100, 6]]
    assert ids.dtype == torch.int64


class TestCheckpoint:
    """What ships with the package."""

    def test_it_is_small_and_has_the_promised_context(self) -> None:
        assert sum(file.stat().st_size for file in DEMO_MODEL.glob("*.*")) <= 8_000_000
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert config["max_position_embeddings"] >= 2048
        assert isinstance(json.loads((DEMO_MODEL / "generation_config.json").read_text())["eos_token_id"], list)

    @pytest.mark.parametrize("name", ["chat_template.jinja"])
    def test_its_template_is_the_one_it_was_trained_with(self, name: str) -> None:
        source = Path(train.__file__).with_name(name)
        assert (DEMO_MODEL / name).read_text().rstrip("\n") == source.read_text().rstrip("\n")

    def test_it_answers_held_out_questions(self) -> None:
        """A sample of what RESULTS.md counts in full."""
        torch.set_num_threads(1)
        chat = evaluate.Chat(DEMO_MODEL)
        easy = ("sum", "json", "glossary", "identity", "recall", "no_tool", "repeat")
        documents: list[dict[str, Any]] = [
            d for d in generate.evaluation_documents(random.Random(8), 3) if d["kind"] in easy
        ]
        wrong = evaluate.wrong_answers(chat, documents, batch=len(documents))
        assert len(documents) >= 18
        assert len(wrong) <= 1, wrong


def test_the_acceptance_of_drafts_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"kind": "story", "messages": [tools.user("Tell me a story."), tools.assistant("")]}))
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 12)
    arguments = ["--model", str(DEMO_MODEL), "--heldout", str(heldout), "--temperatures", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["acceptance", *arguments])
    acceptance.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rules = ("strict", "probabilistic")
    assert [(row[0], row[2]) for row in rows[1:5]] == [(name, rule) for name in ("draft", "eagle") for rule in rules]
    assert all(0 < float(row[3].rstrip("%")) <= 100 for row in rows[1:5])
    assert [row[0] for row in rows[6:]] == ["draft", "eagle"]
    assert all(float(cell) > 0 for row in rows[6:] for cell in row[1:])
