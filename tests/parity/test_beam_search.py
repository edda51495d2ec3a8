"""The offline beam search against that of transformers, on small random models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from tokenloom import LLM, BeamSearchParams

VOCAB_SIZE = 97
END = 11
PROMPTS = [[5, 17, 33], list(range(1, 41)), [2] * 19, [96]]


def save_model(directory: Path) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0")).save(str(directory / "tokenizer.json"))
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beams")


@pytest.fixture(scope="module")
def model(directory: Path) -> transformers.LlamaForCausalLM:
    return save_model(directory)


@pytest.fixture(scope="module", params=[True, False], ids=["cached", "uncached"])
def llm(model: transformers.LlamaForCausalLM, directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(
        directory,
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=256,
        enable_prefix_caching=request.param,
        max_num_seqs=16,
    )
    yield llm
    llm.close()


@torch.inference_mode()
def reference(
    model: transformers.LlamaForCausalLM, prompt: list[int], width: int, max_tokens: int, end: int | None
) -> list[tuple[list[int], float]]:
    """Return the sequences of transformers and their sums of log probabilities (``length_penalty`` 0), best first."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        length_penalty=0.0,
        early_stopping="never",
        eos_token_id=end,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for tokens, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        if end is not None and end in tokens[len(prompt) :]:
            del tokens[tokens.index(end, len(prompt)) + 1 :]  # padding
        sequences.append((tokens, score))
    return sequences


@pytest.mark.parametrize("width", [2, 5])
def test_the_same_sequences_of_full_length(llm: LLM, model: transformers.LlamaForCausalLM, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=20, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference(model, prompt, width, 20, None)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert sums == pytest.approx([score for _, score in expected], abs=1e-3)


@torch.inference_mode()
def as_in_vllm(
    model: transformers.LlamaForCausalLM, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """Search with the logits of transformers and vLLM's rules; return the sequences with their sums, best first."""
    live: list[tuple[list[int], float]] = [(prompt, 0.0)]
    done = []
    for _ in range(params.max_tokens):
        logits = model(torch.tensor([tokens for tokens, _ in live])).logits[:, -1]
        best = logits.log_softmax(-1).topk(2 * params.beam_width)
        grown = []
        for (tokens, total), values, ids in zip(live, best.values.tolist(), best.indices.tolist(), strict=True):
            for value, token_id in zip(values, ids, strict=True):
                (done if token_id == END else grown).append(([*tokens, token_id], total + value))
        live = sorted(grown, key=lambda each: -each[1])[: params.beam_width]

    def score(each: tuple[list[int], float]) -> float:
        tokens, total = each
        return total / (len(tokens) - (tokens[-1] == END)) ** params.length_penalty

    return sorted([*done, *live], key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_the_same_sequences_with_an_end_token(
    llm: LLM, model: transformers.LlamaForCausalLM, width: int, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=length_penalty)
    prompts = [[first, 7, 9] for first in range(20, 40)]
    reasons = set()
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = as_in_vllm(model, prompt, params)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert sums == pytest.approx([total for _, total in expected], abs=1e-3)
        reasons |= {(sequence.finish_reason, sequence.stop_reason) for sequence in output.sequences}
    assert reasons <= {("stop", END), ("length", None)}
    assert len(reasons) == 2 or length_penalty != 1.0


def test_the_best_sequence_is_as_likely_as_that_of_transformers(llm: LLM, model: transformers.LlamaForCausalLM) -> None:
    """It may be likelier: transformers ends a sequence only with one of the best ``beam_width`` candidates."""
    prompts = [[first, 7, 9] for first in range(20, 40)]
    same = 0
    for prompt, output in zip(
        prompts,
        llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=0.0)),
        strict=True,
    ):
        tokens, total = reference(model, prompt, 4, 10, END)[0]
        best = output.sequences[0]
        same += best.tokens == tokens
        assert best.tokens == tokens or best.cum_logprob > total
    assert same
