"""Images and sounds of callers of the offline API get the tokens of transformers' whole classes: text to rows to
tokens."""

from pathlib import Path

import pytest
import transformers

from tests.checkpoints.sound_prompts import SoundModel
from tests.checkpoints.vision_prompts import UNWRITTEN, VisionModel, picture
from tests.checkpoints.whole_sound import sound, write_whole_sound
from tests.checkpoints.whole_vision import FAMILIES, write_whole_vision
from tests.parity.vision_checkpoints import load_vision
from tokenloom import LLM, SamplingParams
from tokenloom.services.tokenizer.media.media_reader import MediaReader

NUM_TOKENS = 12
PROMPTS = [[(200, 120, 0)], [(200, 120, 0), (90, 210, 1)], [(200, 120, 3)], []]
"""The width, height and seed of each image."""


def _mark(kind: str, path: Path, llm: LLM) -> str:
    """Return what a chat template of the family writes for an image: the mark, and for Qwen's the tokens around it."""
    reader = MediaReader.of_checkpoint(path, llm.get_tokenizer())
    assert reader is not None
    return FAMILIES[kind].image_text if kind.startswith("qwen") else reader.family.mark


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_with_images(kind: str, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    model = VisionModel(kind, path, load_vision(path))
    shown = [[picture(*each) for each in images] for images in PROMPTS]
    if kind == "llava_onevision":  # whose rows depend on the number of images, which ``VisionModel`` leaves out
        del shown[1]
    wanted = [model.generate(model.prompt(images), NUM_TOKENS) for images in shown]
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=1500, num_threads=1)
    mark = _mark(kind, path, llm)
    prompts = [
        {
            "prompt": f"<s>Look: {' and '.join([mark] * len(images))} What is this?",
            "multi_modal_data": {"image": images},
        }
        for images in shown
    ]
    bias = dict.fromkeys(UNWRITTEN, -100.0) if kind.startswith("gemma4") else None
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=bias)
    for _ in range(2):  # the second time most of each prompt is in the prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(wanted)
        assert [output.prompt_token_ids for output in outputs] == [case.prompt for case in wanted]
        assert [output.outputs[0].token_ids for output in outputs] == [case.tokens for case in wanted]
    assert len({tuple(case.tokens) for case in wanted}) > 1
    llm.close()


def test_chats_and_prompts_with_sounds(tmp_path: Path) -> None:
    path = write_whole_sound("qwen2_audio", tmp_path)
    model, sounds = SoundModel(path), [sound(1.0), sound(2.345, 1), sound(1.0, 2)]
    question = {"type": "text", "text": "What is it?"}
    chats = [
        [{"role": "user", "content": [*({"type": "audio", "audio": each} for each in given), question]}]
        for given in (sounds[:1], sounds[1:], sounds[2:])
    ]
    texts = [model.text(chat) for chat in chats]
    wanted = [
        model.generate(model.prompt(text, given), NUM_TOKENS)
        for text, given in zip(texts, (sounds[:1], sounds[1:], sounds[2:]), strict=True)
    ]
    assert wanted[0].tokens != wanted[2].tokens
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=300, num_threads=1)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [
        {"prompt": text, "multi_modal_data": {"audio": given}}
        for text, given in zip(texts, (sounds[:1], sounds[1:], sounds[2:]), strict=True)
    ]
    for outputs in (
        llm.chat(chats, params, use_tqdm=False),
        llm.generate(prompts, params, use_tqdm=False),
    ):  # the second time most of each prompt is in the prefix cache
        assert [output.error for output in outputs] == [None] * len(wanted)
        assert [output.prompt_token_ids for output in outputs] == [case.prompt for case in wanted]
        assert [output.outputs[0].token_ids for output in outputs] == [case.tokens for case in wanted]
    llm.close()


def test_the_published_template_has_places_for_sounds(tmp_path: Path) -> None:
    """As transformers has it, for checkpoints that come without one."""
    path, heard = write_whole_sound("qwen2_audio", tmp_path), sound(0.5)
    template = transformers.Qwen2AudioProcessor.default_chat_template.fget(None)
    question = {"type": "text", "text": "What is it?"}
    turns = [
        {"role": "user", "content": [{"type": "audio", "audio": heard}, question, {"type": "audio", "audio": heard}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Sure?"},
    ]
    model = SoundModel(path)
    text = model.processor.apply_chat_template(
        turns, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert "Audio 2: <|audio_bos|>" in text
    llm = LLM(str(path), worker="hash", num_gpu_blocks_override=64)
    (output,) = llm.chat(turns, SamplingParams(max_tokens=1), chat_template=template, use_tqdm=False)
    assert output.prompt_token_ids == model.prompt(text, [heard, heard]).token_ids
    llm.close()
