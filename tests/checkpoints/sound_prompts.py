"""Makes prompts with sounds for the checkpoints of ``whole_sound.py``, with rows from transformers' own tower, and the
tokens that the whole model generates: what a mesh, an engine or a tower is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.checkpoints.vision_prompts import Picture, VisionPrompt
from tests.checkpoints.whole_sound import AUDIO_ID, RATE, load_sound
from tests.parity.identical import Case

Samples = npt.NDArray[np.float32]


class SoundModel:
    """Computes prompts with the whole model of a checkpoint of Qwen2-Audio.

    Attributes:
        processor: Transformers' own, which makes tokens and features of texts and sounds.
    """

    def __init__(self, path: Path) -> None:
        self.model = load_sound(path)
        self.model.generation_config.eos_token_id = None
        extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(path)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        self.processor: Any = transformers.Qwen2AudioProcessor(extractor, tokenizer, tokenizer.chat_template)

    def text(self, messages: Sequence[Any]) -> str:
        """Return a rendered conversation, in which a mark stands for each sound."""
        text: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    @torch.inference_mode()
    def prompt(self, text: str, sounds: Sequence[Samples]) -> VisionPrompt:
        """Return the prompt of a text with a mark for each sound."""
        given: dict[str, Any] = {"audio": list(sounds), "sampling_rate": RATE} if sounds else {}
        inputs = dict(self.processor(text=text, **given, return_tensors="pt"))
        ids = inputs["input_ids"][0].tolist()
        rows = self._rows(inputs) if sounds else np.zeros((0, 1), np.float32)
        places = [place for place, each in enumerate(ids) if each == AUDIO_ID]
        heard, taken = [], 0
        for sound in sounds:
            count = num_rows(len(sound))
            heard.append(Picture(rows[taken : taken + count], places[taken : taken + count]))
            taken += count
        assert taken == len(places)
        return VisionPrompt(ids, heard, inputs)

    @torch.inference_mode()
    def generate(self, prompt: VisionPrompt, num_tokens: int) -> Case:
        """Return the tokens of the largest logits."""
        output = self.model.generate(
            **prompt.inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, len(prompt.token_ids) :].tolist()
        return Case(prompt.token_ids, tokens, torch.cat(output.logits).numpy())

    def _rows(self, inputs: dict[str, Any]) -> Samples:
        """Return what the decoder gets in place of the embeddings of all sounds' tokens."""
        taken: list[torch.Tensor] = []
        decoder = self.model.model.language_model
        hook = decoder.register_forward_pre_hook(
            lambda _, __, given: taken.append(given["inputs_embeds"]), with_kwargs=True
        )
        self.model(**inputs)
        hook.remove()
        rows: Samples = taken[0][inputs["input_ids"] == AUDIO_ID].numpy()
        return rows


def num_rows(num_samples: int) -> int:
    """Return how many rows the processor gives to a sound."""
    frames = -(-num_samples // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
