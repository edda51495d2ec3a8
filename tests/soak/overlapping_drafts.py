"""``python -m tests.soak.overlapping_drafts``: random requests over two engines whose steps overlap and verify drafts.

Prompts are computed on one engine and go on in the other, which pulls their KV; some have grammars, some are aborted,
and the engines are too small for all of them, so that requests are preempted. Every request that is not aborted must
get the tokens of a plain engine, which has neither drafts nor overlapping steps.
"""

import argparse
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping

import numpy as np

from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.kv_pair import Pair
from tests.engine_core.structured_output.helpers import (
    PERSON,
    VOCAB_SIZE,
    config,
    json_schema,
    make_client,
    make_request,
    run,
    token_ids_of,
)
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.fake_workers.hash_row import HashRow
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

_GRAMMARS = (
    json_schema(PERSON),
    StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])"),
    StructuredOutput(GrammarKind.REGEX, r"(red|green) [0-9]{2,5}(, [a-z]{1,6}){0,4}"),
)
_MOST_TOKENS = 120
"""Of a prompt and its output."""
_COMPILE_SECONDS = 120.0
_MOST_IDLE = 1000
"""Turns in which nothing happens."""
Outputs = Mapping[tuple[int, ...], list[int]]
"""The right outputs, by prompt."""


class ReplayingWorker(HashWorker):
    """Drafts what the plain engine has answered; a hash of the tokens so far decides which drafts are wrong."""

    def __init__(self, engine: EngineConfig, outputs: Outputs, wrong_of_ten: int) -> None:
        super().__init__(engine, vocab_size=VOCAB_SIZE, max_model_len=256)
        self._outputs, self._wrong_of_ten = outputs, wrong_of_ten

    def _propose(self, row: HashRow, count: int, num_sampled: int) -> list[int]:
        # A row that was added with accepted tokens counts them as its prompt.
        for length in range(row.num_prompt_tokens, 0, -1):
            if (output := self._outputs.get(tuple(row.token_ids[:length]))) is not None:
                break
        else:
            raise AssertionError(f"no such prompt: {row.token_ids}")
        following = output[len(row.token_ids) - length :][:count]
        seed = zlib.crc32(np.array(row.token_ids).tobytes())
        wrong = [(seed + place * 7) % 10 < self._wrong_of_ten for place in range(len(following))]
        return [(token_id + is_wrong) % VOCAB_SIZE for token_id, is_wrong in zip(following, wrong, strict=True)]


def random_requests(rng: random.Random, count: int) -> list[EngineCoreRequest]:
    """Return requests with different prompts, of which a third has a grammar."""
    made = list[EngineCoreRequest]()
    for index in range(count):
        prompt = [index, *([rng.randrange(3, 6)] * rng.randint(1, 30))]
        grammar = rng.choice(_GRAMMARS) if rng.random() < 0.35 else None
        most = _MOST_TOKENS - len(prompt) if grammar else rng.randint(1, 40)
        made.append(make_request(f"r{index}", grammar, prompt=prompt, max_tokens=most))
    return made


def plain_outputs(requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Return what an engine without drafts answers, whose steps do not overlap."""
    client = make_client()
    found = {name: token_ids_of(outputs) for name, outputs in run(client, requests).items()}
    client.close()
    return found


def run_pair(seed: int, count: int) -> Counter[str]:
    """Ask a pair of engines ``count`` requests. Returns what happened. Raises ``AssertionError`` for a wrong token."""
    rng = random.Random(seed)
    requests = random_requests(rng, count)
    expected = plain_outputs(requests)
    outputs = {tuple(request.prompt_token_ids): expected[request.request_id] for request in requests}
    wrong = rng.choice((0, 2, 5, 10))
    pair = Pair(
        executor=rng.choice(("late", "threaded")),
        copies_at_once=rng.random() < 0.5,
        caching=rng.random() < 0.5,
        budget=rng.choice((16, 64)),
        num_blocks=rng.choice((32, 44)),
        num_drafts=rng.choice((1, 3, 6)),
        draft_model=rng.choice(("", "small")),
        structured_output=config(),
        worker_of=lambda engine: ReplayingWorker(engine, outputs, wrong),
    )
    for engine in pair.engines:
        assert engine.core.scheduler.drafts is not None
        engine.core.scheduler.drafts.costs = None
    for request in requests:
        options = {"early": rng.random() < 0.5, "swap": rng.random() < 0.3}
        params = request.sampling_params
        pair.add(request.request_id, request.prompt_token_ids, params.max_tokens, params=params, **options)
        for _ in range(rng.randrange(4)):
            pair.turn()
        if rng.random() < 0.15:
            pair.abort(rng.choice(list(pair.requests.values())))
    _settle(pair)
    seen = _check(pair, expected)
    seen["with a grammar"] = sum(request.sampling_params.structured_output is not None for request in requests)
    pair.shutdown()
    return seen


def _settle(pair: Pair) -> None:
    """Run until every request is done. The pair's own time passes only where nothing else is waited for, and that is
    never a grammar, which is compiled in a process."""
    changed = threading.Event()
    for engine in pair.engines:
        engine.core.on_update(changed.set)
    num_idle = 0
    while num_idle < 4 or not pair.is_idle:
        changed.clear()
        if pair.turn():
            num_idle = 0
        elif any(engine.core.is_compiling() for engine in pair.engines):
            assert changed.wait(_COMPILE_SECONDS), "a grammar does not compile"
        else:
            num_idle += 1
            pair.clock.now += 5.0
            assert num_idle < _MOST_IDLE, "requests wait for nothing"


def _check(pair: Pair, expected: Mapping[str, list[int]]) -> Counter[str]:
    seen = Counter[str]()
    for name, request in pair.requests.items():
        assert not request.error, request.error
        right = expected[name]
        assert request.tokens == (right[: len(request.tokens)] if request.is_aborted else right), name
        seen["aborted" if request.is_aborted else "answered"] += 1
        if not request.is_aborted:
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    for engine in pair.engines:
        check_idle(engine.core.scheduler)
        stats = engine.stats
        seen["preempted"] += stats.num_preemptions
        seen["drafts"] += stats.spec_decoding.num_draft_tokens
        seen["right drafts"] += stats.spec_decoding.num_accepted_tokens
        seen["blocks moved"] += engine.transport.num_blocks
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.overlapping_drafts", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; the others follow")
    parser.add_argument("--at-once", type=int, default=20, help="requests of a pair, more than it has room for")
    arguments = parser.parse_args()
    started, seen = time.monotonic(), Counter[str]()
    for number in range(-(-arguments.requests // arguments.at_once)):
        seen += run_pair(arguments.seed + number, arguments.at_once)
    print(f"{seen['answered'] + seen['aborted']} requests, {time.monotonic() - started:.0f} s: no wrong token")
    for name, count in sorted(seen.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
