"""The pictures and questions of the picture model, and the checkpoint that came of them."""

import random
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.picture_model import drawing, evaluate, questions, train
from tokenloom import LLM, SamplingParams
from tokenloom.model_files.model_path import PACKAGED

MODEL = PACKAGED["tokenloom-picture"]


def test_the_same_seed_draws_the_same_pictures() -> None:
    first, second = ([drawing.draw(drawing.make_scene(rng), rng).tobytes() for _ in range(9)] for rng in _pair())
    assert first == second
    assert len(set(first)) == 9


def _pair() -> Iterator[random.Random]:
    return (random.Random(3) for _ in range(2))


def test_a_picture_shows_its_colours_where_the_scene_says() -> None:
    shapes = drawing.Shape("circle", "red", 12, 24, 8), drawing.Shape("square", "white", 36, 24, 8)
    picture = drawing.draw(drawing.Scene(shapes, "black"), random.Random(1))
    scale = picture.width / drawing.CANVAS
    red, white, black = (picture.getpixel((round(x * scale), round(24 * scale))) for x in (12, 36, 24))
    assert red[0] > 150 > 80 > max(red[1:])
    assert min(white) > 200
    assert max(black) < 50


@pytest.mark.parametrize("kind", questions.MAKERS)
def test_questions_and_answers_are_finished_text(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        scene = drawing.make_scene(rng)
        for text in questions.MAKERS[kind](scene, rng):
            assert text == text.strip() != ""
            assert kind == "limits" or not re.search(r"[{}]|\ba [aeiou]|  ", text), text


def test_the_answer_names_every_shape_and_where_it_is() -> None:
    left, right = drawing.Shape("star", "orange", 10, 20, 6), drawing.Shape("cross", "blue", 38, 26, 6)
    rng = random.Random(1)
    for shapes in ((left, right), (right, left)):
        scene = drawing.Scene(shapes, "white")
        assert questions.MAKERS["what"](scene, rng)[1] == "There is an orange star to the left of a blue cross."
    alone = drawing.Scene((drawing.Shape("circle", "green", 38, 8, 6),), "grey")
    assert questions.MAKERS["what"](alone, rng)[1] == "There is a green circle at the top right."


class TestCheckpoint:
    """What ships with the package."""

    def test_it_is_small(self) -> None:
        assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 8_000_000

    def test_its_template_is_the_one_it_was_trained_with(self) -> None:
        source = Path(train.__file__).with_name("chat_template.jinja")
        assert (MODEL / source.name).read_text().rstrip("\n") == source.read_text().rstrip("\n")

    def test_it_was_trained_on_the_pixels_of_its_processor(self) -> None:
        processor = transformers.AutoImageProcessor.from_pretrained(MODEL, backend="pil")  # type: ignore[no-untyped-call]
        rng = random.Random(2)
        for _ in range(8):
            picture = drawing.draw(drawing.make_scene(rng), rng)
            pixels = processor(picture, return_tensors="pt")["pixel_values"][0]
            torch.testing.assert_close(train.pixels_of(picture), pixels, rtol=0, atol=1e-5)

    def test_it_answers_about_unseen_pictures(self) -> None:
        """A sample of what `evaluate` counts in full."""
        asked = evaluate.unseen(8, 100)
        with closing(LLM("tokenloom-picture", dtype="float32", num_threads=1)) as llm:
            found = evaluate.answers(llm, asked)
        wrong = [(*each, answer) for each, answer in zip(asked, found, strict=True) if answer != each[3]]
        assert len(asked) == 220
        assert sum(each[0] == "what" for each in wrong) <= 5, wrong
        assert len(wrong) <= 26, wrong

    def test_its_tokens_are_those_of_transformers(self) -> None:
        torch.set_num_threads(1)
        asked = [each for each in evaluate.unseen(9, 8) if each[1] is not None]
        whole = _Whole()
        with closing(LLM("tokenloom-picture", dtype="float32", num_threads=1)) as llm:
            outputs = llm.chat([_turn(*each[1:3]) for each in asked], SamplingParams(temperature=0.0, max_tokens=40))
        answers = [output.outputs[0].token_ids for output in outputs]
        assert answers == [whole.answer(picture, question) for _, picture, question, _ in asked]
        assert len(set(map(tuple, answers))) > 8


def _turn(picture: Any, question: str) -> list[dict[str, Any]]:
    shown = {"type": "image_url", "image_url": {"url": picture}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]


class _Whole:
    """The checkpoint behind transformers, in float32."""

    def __init__(self) -> None:
        self._model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
        self._images: Any = transformers.AutoImageProcessor.from_pretrained(MODEL, backend="pil")  # type: ignore[no-untyped-call]
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)

    @torch.inference_mode()
    def answer(self, picture: Any, question: str) -> list[int]:
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text.replace(train.IMAGE, train.IMAGE * train.ROWS), return_tensors="pt")
        pixels = self._images(picture, return_tensors="pt")
        output: Any = self._model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            pixel_values=pixels["pixel_values"],
            max_new_tokens=40,
            do_sample=False,
        )
        tokens: list[int] = output[0, ids["input_ids"].shape[1] :].tolist()
        return tokens
