"""``python -m tests.soak.schemas``: random JSON schemas; whatever the demo model draws must obey its own."""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator

import jsonschema

from tests.schemas import random_schema
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams, GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.records.grammar_config import structured_output_config

MAX_TOKENS = 1200
BATCH = 30


def check_schemas(seeds: range, *, num_blocks: int = 512) -> None:
    """Has the demo model write a document for each schema. Raises what is wrong, with the seed."""
    config = EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL)),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=BATCH),
        structured_output=structured_output_config(DEMO_MODEL),
    )
    client = InprocClient(config, UniProcExecutor(CPUWorker(config)))
    try:
        tokenizer = load_tokenizer(DEMO_MODEL)
        schemas = {str(seed): random_schema(random.Random(seed)) for seed in seeds}
        eos = CheckpointInfo.load(DEMO_MODEL).eos_token_ids
        prompt = tokenizer.encode("Once upon a time").ids
        for seed, schema in schemas.items():
            constraint = StructuredOutput(GrammarKind.JSON, json.dumps(schema))
            params = CoreSamplingParams(
                max_tokens=min(MAX_TOKENS, client.ready.max_model_len - len(prompt)),
                seed=int(seed),
                temperature=1.0,
                stop_token_ids=eos,
                structured_output=constraint,
            )
            client.add_request(EngineCoreRequest(seed, prompt, params))
        for seed, token_ids, last in _finished(client, set(schemas)):
            text = tokenizer.decode(token_ids)
            where = f"seed {seed}, schema {schemas[seed]}, text {text!r}"
            assert last.finish_reason is FinishReason.STOP, f"{last.finish_reason!r} {last.error}: {where}"
            try:
                jsonschema.validate(json.loads(text), schemas[seed])
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(where) from error
    finally:
        client.close()


def _finished(client: InprocClient, live: set[str]) -> Iterator[tuple[str, list[int], EngineCoreOutput]]:
    token_ids: dict[str, list[int]] = {request_id: [] for request_id in live}
    while live:
        for output in client.get_output().outputs:
            token_ids[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                live.remove(output.request_id)
                yield output.request_id, token_ids[output.request_id], output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    arguments = parser.parse_args()
    started = time.monotonic()
    end = arguments.seed + arguments.schemas
    for first in itertools.count(arguments.seed, BATCH):
        if first >= end:
            break
        # Every other batch in a cache so small that requests lose their blocks and come back.
        check_schemas(range(first, min(first + BATCH, end)), num_blocks=512 if first // BATCH % 2 else 80)
    print(f"{arguments.schemas} schemas, {time.monotonic() - started:.0f} s: every output parses and obeys its own")


if __name__ == "__main__":
    main()
