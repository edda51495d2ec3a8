"""``python -m tests.engine_core.structured_output.check_xgrammar``: the other backend, where its extra is installed.

Compiles in the process that may be killed, runs a core over it, and checks what comes out. Prints what it saw.
"""

import json
import re

import jsonschema
import msgspec

from tests.engine_core.structured_output import helpers
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.wire.core_sampling_params import GrammarKind, StructuredOutput

OPEN = {name: value for name, value in helpers.PERSON.items() if name != "additionalProperties"}
GOOD = {
    "schema": helpers.json_schema(helpers.PERSON),
    "open": helpers.json_schema(OPEN),
    "regex": StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])"),
    "choice": StructuredOutput(GrammarKind.CHOICE, '["red", "light blue"]'),
    "grammar": StructuredOutput(GrammarKind.GRAMMAR, 'root ::= "<" [a-c] [a-c] ">"'),
}
BAD = {
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
    print(texts)
    for name in BAD:
        (refused,) = outputs[name]
        assert refused.error_field == "structured_outputs"
        print(f"{name}: {refused.error}")


if __name__ == "__main__":
    main()
