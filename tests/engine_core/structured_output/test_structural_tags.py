"""Structural tags in llguidance; ``check_xgrammar`` compares xgrammar with the same texts."""

import json
from typing import Any

import pytest

from tests.engine_core.structured_output.helpers import EOS, allowed, backend, encode, make_request, run, text_of
from tests.engine_core.structured_output.structural_tags import ARGUMENTS, CASES, F
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.structured_output.grammar_backend import Grammar, GrammarError
from tokenloom.engine_core.structured_output.llguidance_backend import structural_tag_grammar


def follow(name: str, text: str) -> Grammar:
    grammar = backend().load(backend().prepare(CASES[name].constraint)).start()
    grammar.accept_tokens(encode(text))
    return grammar


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_their_tag(name: str) -> None:
    case = CASES[name]
    for text in case.complete:
        assert EOS in allowed(follow(name, text)), text
    for text in case.begun:
        assert EOS not in allowed(follow(name, text)), text
    for text in case.wrong:
        with pytest.raises(GrammarError):
            follow(name, text)


def test_an_output_of_the_engine_follows_its_tag(client: InprocClient) -> None:
    names = [name for name in CASES if "special" not in name]  # the fake worker draws those, too
    outputs = run(client, [make_request(name, CASES[name].constraint) for name in names])
    for name in names:
        assert not outputs[name][-1].error, name
    assert text_of(outputs["one"]).startswith("<f=")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"type": "grammar", "grammar": 'root ::= "a"'}, "the format grammar"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes of the format any_text"),
        ({**ARGUMENTS, "style": "qwen_xml"}, "style of the format json_schema"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, ARGUMENTS]}, "any_text with something behind"),
        ({**F, "content": {"type": "any_text"}, "end": ["a", ""]}, "an end that may be empty"),
        ({**F, "content": {"type": "regex", "pattern": "a", "excludes": "x"}}, "also or excludes is no list of texts"),
        ({**F, "content": {"type": "regex", "pattern": "a", "excludes": ["x"], "also": [3]}}, "also or excludes is no"),
        ({"type": "regex", "pattern": "a", "excludes": ["x"]}, "a regex that excludes texts without an end"),
        ({**F, "begin": {"type": "token", "token": 3}}, "names a token"),
    ],
)
def test_what_the_backend_lacks_is_named_with_the_one_that_has_it(found: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=rf"{words}.* is not supported by .*llguidance.*xgrammar"):
        structural_tag_grammar(json.dumps({"format": found}), {}, str)
