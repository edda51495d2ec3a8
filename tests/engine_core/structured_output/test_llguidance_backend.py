import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_core.structured_output.helpers import EOS, PERSON, allowed, backend, encode, start
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError

GBNF = 'root ::= "a" ("b" | [c-d])* "e"'
LARK = 'start: "a" /[bcd]*/ "e"'


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (GrammarKind.JSON, json.dumps(PERSON), '{"name": "Ada", "age": 36}', '{"name": 1'),
        (GrammarKind.JSON_OBJECT, "", '{"a": [1, {}]}', "[1]"),
        (GrammarKind.REGEX, r"\d{3}-[a-z]+", "123-x", "12-x"),
        (GrammarKind.CHOICE, '["yes", "no"]', "no", "maybe"),
        (GrammarKind.GRAMMAR, GBNF, "abcde", "abf"),
        (GrammarKind.GRAMMAR, LARK, "abcde", "abf"),
    ],
)
def test_a_text_is_followed_to_its_end(kind: GrammarKind, source: str, good: str, bad: str) -> None:
    grammar = start(kind, source)
    assert EOS not in allowed(grammar)
    token_ids = encode(good)
    assert grammar.validate_tokens(token_ids) == len(token_ids)
    assert grammar.validate_tokens(encode(bad)) < len(encode(bad))
    for token_id in token_ids:
        assert token_id in allowed(grammar)
        grammar.accept_tokens([token_id])
    assert EOS in allowed(grammar)
    with pytest.raises(GrammarError):
        grammar.accept_tokens(encode("!!"))


def test_going_back_is_as_if_it_had_never_gone() -> None:
    grammar = start(GrammarKind.REGEX, "(ab)+")
    first = allowed(grammar)
    grammar.accept_tokens(encode("ab"))
    after = allowed(grammar)
    grammar.rollback(len(encode("ab")))
    assert allowed(grammar) == first
    grammar.accept_tokens(encode("ab"))
    assert allowed(grammar) == after
    grammar.reset()
    assert allowed(grammar) == first
    with pytest.raises(GrammarError):
        grammar.rollback(1)


def test_outputs_of_one_grammar_do_not_meet() -> None:
    compiled = backend().load(backend().prepare(StructuredOutput(GrammarKind.REGEX, "ab")))
    one, other = compiled.start(), compiled.start()
    before = allowed(other)
    one.accept_tokens(encode("ab"))
    assert allowed(one) == {EOS}
    assert allowed(other) == before


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (GrammarKind.JSON, '{"type": "wat"}', "wat"),
        (GrammarKind.JSON, "true", "object schema"),
        (GrammarKind.JSON, '{"type": "object", "minProperties": {}}', "minProperties"),
        (GrammarKind.JSON, '{"$ref": "https://example.com/a"}', "does not fetch"),
        (GrammarKind.JSON, '{"$ref": "#"}', "refers to itself"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.GRAMMAR, "root = 3", "Expected ::="),
        (GrammarKind.GRAMMAR, "root ::= missing", "missing"),
        (GrammarKind.GRAMMAR, "root ::= " + "(" * 5000, "recursion"),
        (GrammarKind.GRAMMAR, "start: missing", "missing"),
    ],
)
def test_an_invalid_grammar_is_explained(kind: GrammarKind, source: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        backend().prepare(StructuredOutput(kind, source))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("expression", ["(a", "a(?=b)", r"\p{Zz}"])
def test_what_is_wrong_with_an_expression_is_said_without_the_grammar_that_was_written_of_it(expression: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend().prepare(StructuredOutput(GrammarKind.REGEX, expression))
    assert expression in str(caught.value)
    assert "start:" not in str(caught.value)
    assert "|" not in str(caught.value)


def test_what_is_wrong_with_a_schema_of_a_tag_is_said_without_the_grammar_that_was_written_of_it() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [{"begin": "<t>", "content": content, "end": "</t>"}]}
    source = json.dumps({"type": "structural_tag", "format": tag})
    with pytest.raises(GrammarError) as caught:
        backend().prepare(StructuredOutput(GrammarKind.STRUCTURAL_TAG, source))
    assert str(caught.value) == "Unsatisfiable schema: required property 'a' is unsatisfiable"


any_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
# The tokenizer would encode the name of a special token as that token, which is not text.
plain_text = any_text.filter(lambda text: "<|" not in text)


@settings(max_examples=60, deadline=None)
@given(st.lists(plain_text, min_size=1))
def test_any_texts_may_be_chosen_from(texts: list[str]) -> None:
    prepared = backend().prepare(StructuredOutput(GrammarKind.CHOICE, json.dumps(texts)))
    for text in texts:
        grammar = backend().load(prepared).start()
        grammar.accept_tokens(encode(text))
        assert EOS in allowed(grammar)
