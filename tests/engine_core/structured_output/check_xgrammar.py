"""``python -m tests.engine_core.structured_output.check_xgrammar``: the other backend, where its extra is installed.

Compiles in the process that may be killed, runs a core over it, and checks what comes out. Prints what it saw.
"""

import json
import re

import jsonschema
import msgspec

from tests.engine_core.structured_output import helpers
from tests.engine_core.structured_output.structural_tags import CASES
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.structured_output.grammar_backend import Grammar, GrammarError
from tokenloom.model_files.model_path import DEMO_MODEL

OPEN = {name: value for name, value in helpers.PERSON.items() if name != "additionalProperties"}
GOOD = {
    "schema": helpers.json_schema(helpers.PERSON),
    "open": helpers.json_schema(OPEN),
    "regex": StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])"),
    "choice": StructuredOutput(GrammarKind.CHOICE, '["red", "light blue"]'),
    "grammar": StructuredOutput(GrammarKind.GRAMMAR, 'root ::= "<" [a-c] [a-c] ">"'),
    "compact": msgspec.structs.replace(helpers.json_schema(helpers.PERSON), disable_any_whitespace=True),
    "tag": CASES["one"].constraint,
}
BAD = {
    "whitespace": msgspec.structs.replace(helpers.json_schema(helpers.PERSON), whitespace_pattern=" ?"),
    "tag end": StructuredOutput(
        GrammarKind.STRUCTURAL_TAG,
        '{"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}}',
    ),
    "unclosed": StructuredOutput(GrammarKind.REGEX, "(a"),
    "bomb": helpers.json_schema({"enum": [f"{'value' * 40} {n}" for n in range(20_000)]}),
}


def main() -> None:
    config = EngineConfig(
        worker=WorkerConfig(model="", worker="hash"),
        structured_output=msgspec.structs.replace(helpers.config(), backend="xgrammar"),
    )
    client = InprocClient(
        config, UniProcExecutor(HashWorker(config, vocab_size=helpers.VOCAB_SIZE, max_model_len=2048))
    )
    try:
        requests = [helpers.make_request(name, constraint) for name, constraint in (GOOD | BAD).items()]
        outputs = helpers.run(client, requests)
    finally:
        client.close()
    if errors := {name: error for name in GOOD if (error := outputs[name][-1].error)}:
        raise SystemExit(f"{errors}")
    texts = {name: helpers.text_of(outputs[name]) for name in GOOD}
    jsonschema.validate(json.loads(texts["schema"]), helpers.PERSON)
    jsonschema.validate(json.loads(texts["open"]), helpers.PERSON)  # it holds what is named all the same
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", texts["regex"])
    assert texts["choice"] in ("red", "light blue")
    assert re.fullmatch("<[a-c][a-c]>", texts["grammar"])
    jsonschema.validate(json.loads(texts["compact"]), helpers.PERSON)
    assert not re.search(r"[,:{}\[\]] ", re.sub(r'"(?:[^"\\]|\\.)*"', "x", texts["compact"]))
    assert re.fullmatch(r'<f=x>{\s*"a"\s*:\s*-?\d+\s*}</f>|<f=y>\d+/[ab]</f>', texts["tag"])
    check_structural_tags()
    print(texts)
    for name in BAD:
        (refused,) = outputs[name]
        assert refused.error_field == "structured_outputs"
        print(f"{name}: {refused.error}")


def check_structural_tags() -> None:
    """Both backends agree on which texts follow a structural tag."""
    from tokenloom.engine_core.structured_output.xgrammar_backend import XGrammarBackend

    backend = XGrammarBackend(DEMO_MODEL / "tokenizer.json", helpers.VOCAB_SIZE, (helpers.EOS,))
    for name, case in CASES.items():
        if name == "special tokens":  # they are text to xgrammar, and the tokenizer writes them as one token
            continue
        compiled = backend.load(backend.prepare(case.constraint))
        for texts, expected in ((case.complete, True), (case.begun, False), (case.wrong, None)):
            for text in texts:
                assert ends_after(compiled.start(), text) is expected, (name, text)


def ends_after(grammar: Grammar, text: str) -> bool | None:
    """Return whether a text may end here; None if it does not follow the grammar."""
    try:
        grammar.accept_tokens(helpers.encode(text))
    except GrammarError:
        return None
    return helpers.EOS in helpers.allowed(grammar)


if __name__ == "__main__":
    main()
