"""Whisper's decoder gives transformers' tokens, however its requests are computed."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoints.whisper_checkpoint import ALIGNMENT_HEADS, RATE, whisper_id
from tests.checkpoints.whole_sound import sound
from tests.parity.transcripts import (
    BEGIN,
    NUM_TOKENS,
    PROMPTS,
    Transcript,
    TranscriptEngine,
    transcript_reference,
)
from tokenloom import LLM, SamplingParams
from tokenloom.engine_core.data.core_params import CorePoolingParams, PoolingTask


def wanted() -> list[list[int]]:
    return [case.tokens for case in transcript_reference().cases]


def cases() -> list[Transcript]:
    return transcript_reference().cases


@pytest.mark.parametrize("options", [{}, {"prefix_caching": True}, {"budget": 8, "max_num_seqs": 4}])
def test_tokens_are_those_of_transformers(options: dict[str, Any]) -> None:
    engine = TranscriptEngine(transcript_reference(), **options)
    assert engine.transcribe(cases()) == wanted()
    assert engine.transcribe(cases()[::-1]) == wanted()[::-1]
    assert [engine.transcribe([case])[0] for case in cases()] == wanted()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_backend_computes_them(backend: str) -> None:
    assert TranscriptEngine(transcript_reference(), attention_backend=backend).transcribe(cases()) == wanted()


def test_two_threads_and_batch_invariance() -> None:
    assert TranscriptEngine(transcript_reference(), num_threads=2).transcribe(cases()) == wanted()
    assert TranscriptEngine(transcript_reference(), batch_invariant=True).transcribe(cases()) == wanted()


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_go_on(caching: bool) -> None:
    # Room for the rows of three sounds and some tokens.
    engine = TranscriptEngine(transcript_reference(), num_blocks=3 * 94 + 7, prefix_caching=caching)
    for _ in range(3):
        assert engine.transcribe(cases()) == wanted()
    assert engine.stats.num_preemptions > 0


def test_samples_of_one_sound_share_its_rows() -> None:
    # No room for the rows of two sounds.
    options: dict[str, Any] = {"prefix_caching": True, "num_blocks": 94 + 16, "max_model_len": 100}
    engine, case = TranscriptEngine(transcript_reference(), **options), cases()[0]
    names = [engine.add(case, seed=seed, temperature=1.0) for seed in range(5)]
    samples = engine.run(names)
    assert len({tuple(sample) for sample in samples}) > 1
    assert engine.num_asked == 1
    alone = [TranscriptEngine(transcript_reference()).transcribe([case], temperature=1.0)[0]]
    assert samples[:1] == alone
    assert engine.transcribe([case]) == [case.tokens]
    assert engine.num_asked == 1, "the keys and values were found"


def test_the_key_of_another_sound_gives_other_tokens() -> None:
    engine = TranscriptEngine(transcript_reference(), one_key=True, prefix_caching=True)
    assert engine.transcribe(cases()) != wanted()


@pytest.mark.parametrize("quantization", ["int8-dynamic", None])
def test_other_dtypes_give_nearly_the_tokens(quantization: Any) -> None:
    options = {"quantization": quantization} if quantization else {"dtype": "bfloat16"}
    found = TranscriptEngine(transcript_reference(), **options).transcribe(cases())
    equal = [text[0] == right[0] for text, right in zip(found, wanted(), strict=True)]
    assert sum(equal) >= 4, (found, wanted())


class Outputs(dict[str, Any]):
    """What transformers' ``generate`` would return, as far as it reads it when it aligns tokens."""

    def __init__(self, cross_attentions: Any, sequences: Any) -> None:
        super().__init__()
        self.cross_attentions, self.sequences = cross_attentions, sequences


@torch.inference_mode()
def times_of(case: Transcript, num_frames: int | None) -> list[float]:
    """Return the row at which transformers takes each token to be spoken; the last one has that of the one before."""
    model, ids = transcript_reference().model, torch.tensor([case.prompt + case.tokens])
    encoded = torch.from_numpy(case.rows)[None]
    found = model.model.decoder(ids, encoder_hidden_states=encoded, output_attentions=True).cross_attentions
    times = model._extract_token_timestamps(
        Outputs([found], ids), ALIGNMENT_HEADS, 1.0, num_frames=num_frames, num_input_ids=len(case.prompt)
    )
    rows: list[float] = times[0, :-1].tolist()
    return rows


@pytest.mark.parametrize("options", [{}, {"budget": 8, "max_num_seqs": 4}, {"attention_backend": "torch"}])
def test_tokens_are_timed_as_by_transformers(options: dict[str, Any]) -> None:
    engine = TranscriptEngine(transcript_reference(), prefix_caching=True, **options)
    names = []
    for index, case in enumerate(cases()):
        spoken = replace(case, prompt=case.prompt + case.tokens)
        rows = 0 if index % 2 else 700
        pooling = CorePoolingParams(PoolingTask.ALIGN, skipped_tokens=len(case.prompt), aligned_rows=rows)
        names.append(engine.add(spoken, 1, pooling))
    engine.add(cases()[0])  # another request decodes meanwhile
    engine.run([*names, "transcript-6"])
    for index, (name, case) in enumerate(zip(names, cases(), strict=True)):
        assert engine.pooled[name].tolist() == times_of(case, None if index % 2 else 1400), index
    assert len({tuple(engine.pooled[name].tolist()) for name in names}) == len(names)


def test_the_offline_api_hears_the_sound_beside_a_prompt() -> None:
    reference = transcript_reference()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    llm = LLM(str(reference.path), dtype="float32", num_kv_blocks=1000)
    with closing(llm):
        prompts = [
            {"prompt_token_ids": case.prompt, "multi_modal_data": {"audio": sound(seconds, seed)}}
            for case, (seconds, seed, _) in zip(cases(), PROMPTS, strict=True)
        ]
        outputs = llm.generate(prompts, params)
        text = "".join(BEGIN)
        (spelled,) = llm.generate({"prompt": text, "multi_modal_data": {"audio": (sound(2.0, 0), RATE)}}, params)
        with pytest.raises(ValueError, match=r"has 30.1 seconds, and this model hears 30 at once"):
            llm.generate({"prompt": text, "multi_modal_data": {"audio": sound(30.1, 0)}}, params)
        with pytest.raises(ValueError, match="exactly one, and no image"):
            llm.generate({"prompt": text, "multi_modal_data": {"audio": [sound(1.0), sound(2.0)]}}, params)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    ends = whisper_id("<|endoftext|>")
    assert [[each for each in text if each != ends] for text in found] == [
        [each for each in text if each != ends] for text in wanted()
    ]
    assert list(spelled.outputs[0].token_ids) == found[0]
