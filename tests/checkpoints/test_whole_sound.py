from pathlib import Path

import torch
import transformers

from tests.checkpoints.whole_sound import AUDIO_ID, RATE, load_sound, sound, write_whole_sound


@torch.inference_mode()
def test_tokens_of_qwen2_audio_change_with_the_sound(tmp_path: Path) -> None:
    path = write_whole_sound("qwen2_audio", tmp_path)
    model = load_sound(path)
    model.generation_config.eos_token_id = None
    extractor = transformers.AutoFeatureExtractor.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer, tokenizer.chat_template)
    content = [{"type": "audio"}, {"type": "text", "text": "What is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    texts = []
    for seed in range(3):
        inputs = processor(text=text, audio=[sound(1.0, seed)], sampling_rate=RATE, return_tensors="pt")
        assert int((inputs["input_ids"] == AUDIO_ID).sum()) == 25
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        texts.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    assert len({tuple(each) for each in texts}) == 3, texts
    assert min(len(set(each)) for each in texts) > 4, texts
