"""Tests shown text: stop strings are counted in tokens, stop tokens are not shown, earlier attempts are replayed."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenloom.services.output_processor.text.detokenizer import Detokenizer, StopMatch, Vocabulary


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


@given(
    ids=st.lists(st.integers(0, 345), max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    stop=st.lists(st.text("the ofx\ufffd", min_size=1, max_size=3), max_size=2),
)
def test_how_tokens_are_grouped_into_steps_changes_nothing(
    byte_level_tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str]
) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)

    def run(sizes: list[int]) -> tuple[str, StopMatch | None]:
        detokenizer, text, rest = Detokenizer(vocabulary, [], stop=stop), "", ids
        for size in sizes:
            delta, match = detokenizer.step(rest[:size])
            text, rest = text + delta, rest[size:]
            if match is not None:
                return text, match
        return text + detokenizer.finish(), None

    assert run(sizes) == run([1] * 30)


def test_a_stop_string_counts_the_token_that_completes_it(byte_level_tokenizer: Tokenizer) -> None:
    ids = ids_of(byte_level_tokenizer, "x", "y", "z", "w")
    detokenizer = Detokenizer(Vocabulary(byte_level_tokenizer), [], stop=["yz"])
    assert detokenizer.step(ids[:2]) == ("x", None)
    assert detokenizer.step(ids[2:]) == ("", StopMatch("yz", 3))
    assert detokenizer.step(ids) == ("", None), "tokens after the end are ignored"
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 3


def test_no_stop_string_is_completed_before_min_tokens(byte_level_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    ids = ids_of(byte_level_tokenizer, "x", "y", "z", "y", "z")
    for min_tokens, expected in (
        (2, ("x", StopMatch("yz", 3))),
        (3, ("xyz", StopMatch("yz", 5))),
        (5, ("xyzyz", None)),
    ):
        for steps in ([ids], [[token_id] for token_id in ids]):
            detokenizer = Detokenizer(vocabulary, [], stop=["yz"], min_tokens=min_tokens)
            found = [detokenizer.step(step) for step in steps]
            match = next((match for _, match in found if match is not None), None)
            assert ("".join(text for text, _ in found) + detokenizer.finish(), match) == expected


def test_the_stop_string_is_kept_on_request(byte_level_tokenizer: Tokenizer) -> None:
    ids = ids_of(byte_level_tokenizer, "x", "y", "z", "w")
    detokenizer = Detokenizer(Vocabulary(byte_level_tokenizer), [], stop=["yz"], include_stop_str=True)
    assert detokenizer.step(ids) == ("xyz", StopMatch("yz", 3))


def test_what_was_held_for_a_stop_string_comes_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(Vocabulary(byte_level_tokenizer), [], stop=["yz"])
    assert detokenizer.step(ids_of(byte_level_tokenizer, "x", "y")) == ("x", None)
    assert detokenizer.finish() == "y"


def test_a_stop_token_is_counted_and_not_shown(byte_level_tokenizer: Tokenizer) -> None:
    ids = ids_of(byte_level_tokenizer, "x", "y")
    for include, text in ((False, "x"), (True, "xy")):
        detokenizer = Detokenizer(Vocabulary(byte_level_tokenizer), [], include_stop_str=include)
        assert detokenizer.step(ids, ends_with_stop_token=True) == (text, None)
        assert detokenizer.num_tokens == 2


def test_a_stop_string_may_lie_across_tokens_and_bytes(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("go 😀!").ids
    detokenizer = Detokenizer(Vocabulary(byte_level_tokenizer), [], stop=["😀!"])
    shown = ""
    for i, token_id in enumerate(ids):
        text, match = detokenizer.step([token_id])
        shown += text
        if match is not None:
            assert (i, match.num_tokens) == (len(ids) - 1, len(ids))
    assert shown == "go "
