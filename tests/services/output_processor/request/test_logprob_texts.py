import pytest
from tokenizers import Tokenizer

from tokenloom.request import logprob_columns
from tokenloom.services.output_processor.request.sample_output import PromptLogprobTexts, with_texts
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1.types_pb2 import Logprobs


def columns(n: int, token_ids: list[int]) -> Logprobs:
    return Logprobs(
        sampled=[-float(i) for i in range(n)],
        rank=range(1, n + 1),
        top=len(token_ids),
        token_id=token_ids * n,
        logprob=[-0.5] * (len(token_ids) * n),
    )


def test_bytes_of_tokens_join_to_the_text(byte_level_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    ids = byte_level_tokenizer.encode("the fox \U0001f600", add_special_tokens=False).ids
    texts = with_texts(vocabulary, ids, columns(len(ids), ids[:2]))
    assert b"".join(texts.sampled_text).decode() == "the fox \U0001f600"
    assert list(texts.token_text) == list(texts.sampled_text[:2]) * len(ids)


def test_special_tokens_have_text_and_foreign_ids_have_none(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    for token_id in tokenizer.get_added_tokens_decoder():
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert alone
        assert vocabulary.token_bytes(token_id).decode(errors="replace").strip() == alone.strip()
    assert vocabulary.token_bytes(10**6) == b""


def test_a_prompts_logprobs_are_passed_on_once(byte_level_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    prompt = [1, 2, 3, 4, 5]
    whole = columns(4, [7])
    state = PromptLogprobTexts(vocabulary, prompt)
    first = state.take(1, logprob_columns.part(whole, 0, 2))
    assert first is not None
    assert (first.prompt, first.token_index, first.first_text) == (True, 1, vocabulary.token_bytes(1))
    # The engine died, and another one sends all of it.
    rest = state.take(1, whole)
    assert rest is not None
    assert (rest.token_index, rest.first_text) == (3, b"")
    assert rest.logprobs == logprob_columns.part(whole, 2, 4)
    assert list(rest.sampled_text) == [vocabulary.token_bytes(4), vocabulary.token_bytes(5)]
    assert state.take(1, whole) is None


@pytest.mark.parametrize(("index", "count"), [(2, 1), (1, 5)])
def test_what_cannot_be_the_prompts(byte_level_tokenizer: Tokenizer, index: int, count: int) -> None:
    with pytest.raises(WrongFrame):
        PromptLogprobTexts(Vocabulary(byte_level_tokenizer), [1, 2, 3]).take(index, columns(count, []))
