"""Runs requests with grammars whose drafts are replayed from a run without any, some of them made wrong."""

import zlib

import numpy as np
import pytest

from tests.engine_core.invariants import check_idle
from tests.engine_core.structured_output.helpers import (
    EOS,
    PERSON,
    VOCAB_SIZE,
    json_schema,
    make_client,
    make_request,
    run,
    token_ids_of,
)
from tokenloom.engine_core.data.config import ReasoningConfig
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.fake_workers.hash_row import HashRow
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.request.reasoning import ReasoningMarks

MARKS = ReasoningMarks((2001,), (2002,), begins_inside=False)
DATE = StructuredOutput(GrammarKind.REGEX, r"20\d\d-(0[1-9]|1[0-2])")


def requests() -> list[EngineCoreRequest]:
    made = []
    for n in range(3):
        made += [
            make_request(f"json{n}", json_schema(PERSON), prompt=[n + 1, 5], max_tokens=120),
            make_request(f"date{n}", DATE, prompt=[n + 1, 6]),
            make_request(f"endless{n}", DATE, prompt=[n + 1, 7], stop=()),
            make_request(f"patient{n}", DATE, prompt=[n + 1, 8], min_tokens=500),
            make_request(f"free{n}", None, prompt=[n + 1, 9], max_tokens=20),
            make_request(f"thinks{n}", DATE, prompt=[n + 1, 2001], budget=n * 3),
            make_request(f"rambles{n}", None, prompt=[n + 2, 2001], max_tokens=12, budget=5),
        ]
    return made


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_constrained_outputs_are_those_without_drafts(
    monkeypatch: pytest.MonkeyPatch, wrong: int, overlaps: bool
) -> None:
    outputs = {}
    known: dict[tuple[int, ...], list[int]] = {}

    def replay(self: HashWorker, row: HashRow, count: int, num_new: int) -> list[int]:
        following = known[tuple(row.token_ids[:2])][len(row.token_ids) - 2 :][:count]
        seed = zlib.crc32(np.array(row.token_ids).tobytes())
        is_wrong = [(seed + place * 7) % 10 < wrong for place in range(len(following))]
        return [(each + offset) % VOCAB_SIZE for each, offset in zip(following, is_wrong, strict=True)]

    monkeypatch.setattr(HashWorker, "_propose", replay)
    for num_drafts in (0, 5):
        client = make_client(
            reasoning=ReasoningConfig(marks=MARKS),
            num_drafts=num_drafts,
            async_scheduling=overlaps and num_drafts > 0,
        )
        results = run(client, requests())
        core = client._core
        outputs[num_drafts] = {
            request_id: (token_ids_of(steps), steps[-1].finish_reason, steps[-1].stop_token_id, steps[-1].error)
            for request_id, steps in results.items()
        }
        check_idle(core.scheduler)
        counted = core.scheduler.stats().spec_decoding
        core.shutdown()
        for request in requests():
            known[tuple(request.prompt_token_ids)] = outputs[num_drafts][request.request_id][0]
    assert outputs[0] == outputs[5]
    assert outputs[0]["date0"][2] == EOS
    assert counted is not None
    assert (counted.num_accepted_tokens > 0) == (wrong < 10)
