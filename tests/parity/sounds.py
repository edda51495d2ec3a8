"""Prompts with sounds for an engine, with rows from transformers' tower, and the tokens that the whole model draws."""

import functools
import json
import tempfile
from pathlib import Path

from tests.checkpoints.sound_prompts import SoundModel
from tests.checkpoints.whole_sound import sound, write_whole_sound
from tests.parity.images import NUM_TOKENS, ImageReference
from tokenloom.gpu_worker.checkpoint.files.text_part import media_switches

HEARD = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_PROMPTS: list[tuple[list[tuple[float, int]], str]] = [
    ([(2.0, 0)], "What is this?"),
    ([(2.0, 0), (1.013, 1)], "And these two?"),
    ([(0.1, 2)], "What is this short one?"),
    ([(2.0, 0)], "Why?"),
    ([(2.0, 3)], "Another one?"),
    ([(0.77, 4), (3.3, 5), (0.77, 6)], "And three?"),
    ([], "Hello there."),
]
"""The seconds and seeds of a prompt's sounds, and its question. The fourth asks about the sound of the first; that of
the fifth is as long, so that the two prompts begin with the same ids."""
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # of this process, which removes them at its end


@functools.cache
def sound_reference() -> ImageReference:
    """Return the reference of Qwen2-Audio, made once for all tests of a process."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="sounds-"))
    path = write_whole_sound("qwen2_audio", Path(_FOLDERS[-1].name))
    model, prompts = SoundModel(path), []
    for sounds, text in _PROMPTS:
        marks = "".join(f"Audio {number}: {HEARD}\n" for number in range(1, len(sounds) + 1))
        prompts.append(model.prompt(f"<|im_start|>user\n{marks}{text}", [sound(*each) for each in sounds]))
    media = media_switches(json.loads((path / "config.json").read_text()))
    assert media is not None
    return ImageReference("qwen2_audio", path, prompts, [model.generate(each, NUM_TOKENS) for each in prompts], media)
