"""Recorded requests are computed again: what is equal, what differs and where, and what cannot be replayed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.gpu_worker.lora.random_adapter import save_adapter
from tokenloom import LoRARequest, __version__
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline.offline_request import OfflineRequest
from tokenloom.offline.outputs import RequestOutputKind
from tokenloom.offline.replay import Replayed, Replayer, in_words, options_of
from tokenloom.offline.sampling_params import SamplingParams
from tokenloom.request.request_records import (
    VERSION,
    RecordedLeg,
    RecordedLogprobs,
    RecordedOutput,
    RecordedRequest,
    floats,
)
from tokenloom.v1.types_pb2 import Fingerprint

PROMPT = [5, 600, 7, 80, 9, 1000]
NUMBER_OF_TOKENS = 12


@pytest.fixture(scope="module")
def replayer() -> Iterator[Replayer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Replayer("tokenloom-demo", {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 64})
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(replayer: Replayer) -> RecordedRequest:
    """A record whose outputs are right."""
    engine = replayer._engine
    params = SamplingParams(
        max_tokens=NUMBER_OF_TOKENS,
        n=2,
        seed=3,
        temperature=0.9,
        logprobs=1,
        prompt_logprobs=0,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request("0", {"prompt_token_ids": PROMPT}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    ours = engine.fingerprint()
    rows = [None, *(row for row in (outputs[0].prompt_logprobs or [])[1:])]  # type: ignore[union-attr]
    return RecordedRequest(
        version=VERSION,
        id="a" * 40,
        model="tokenloom-demo",
        path="tokenloom-demo",
        tokenizer=ours.tokenizer.hex(),
        release=__version__,
        began_ms=0,
        ended_ms=1,
        prompt=PROMPT,
        sampling_params={
            "max_tokens": NUMBER_OF_TOKENS,
            "seed": "3",
            "temperature": 0.9,
            "logprobs": 1,
            "prompt_logprobs": 0,
        },
        outputs=[
            RecordedOutput(
                index=each.index,
                token_ids=each.token_ids,
                finish_reason="length",
                text=each.text,
                weights=[ours.weights.hex()],
                numerics=ours.numerics,
                logprobs=[columns(each.token_ids, each.logprobs or [])],
                prompt_logprobs=[columns(PROMPT[1:], rows[1:], start=1)] if not each.index else [],
                legs=[RecordedLeg(engine="e", kind="whole", numerics=ours.numerics, kv_layout=ours.kv_layout)],
            )
            for each in sorted(outputs[0].outputs, key=lambda each: each.index)  # type: ignore[union-attr]
        ],
    )


def columns(token_ids: list[int], rows: list[Any], start: int = 0) -> RecordedLogprobs:
    """The log probabilities of tokens without alternatives."""
    sampled = [row[token_id] for token_id, row in zip(token_ids, rows, strict=True)]
    found = Logprobs([each.logprob for each in sampled], [each.rank for each in sampled])
    return RecordedLogprobs(start=start, sampled=floats(found.sampled), ranks=found.rank)


def with_output(record: RecordedRequest, index: int, **changes: Any) -> RecordedRequest:
    outputs = list(record.outputs)
    outputs[index] = replace(outputs[index], **changes)
    return replace(record, outputs=outputs)


def one(replayer: Replayer, record: RecordedRequest) -> Replayed:
    (result,) = replayer.replay([record])
    return result


def test_what_comes_again_is_equal(replayer: Replayer, recorded: RecordedRequest) -> None:
    results = replayer.replay([recorded, replace(recorded, id="b" * 40)])
    assert [each.is_equal for each in results] == [True, True], results
    assert [each.num_tokens for each in results] == [2 * NUMBER_OF_TOKENS] * 2
    assert [each.notes for each in results] == [[], []]


@pytest.mark.parametrize("is_exact", [True, False])
def test_where_sums_follow_the_batch_a_difference_counts_that_comes_alone_too(
    replayer: Replayer, recorded: RecordedRequest, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fingerprint = replayer._engine.loop.run, replayer._fingerprint

    def rounded(requests: list[OfflineRequest], *more: Any) -> None:
        run(requests, *more)
        if len(requests) > 1:  # another token, only beside others
            token_ids = requests[0].samples[1].completion.token_ids
            token_ids[4] = (token_ids[4] + 1) % 2048

    monkeypatch.setattr(replayer._engine.loop, "run", rounded)
    if not is_exact:
        other = Fingerprint(weights=fingerprint.weights, tokenizer=fingerprint.tokenizer, numerics="cpu/bfloat16")
        monkeypatch.setattr(replayer, "_fingerprint", other)
    wrong = with_output(recorded, 1, token_ids=[*recorded.outputs[1].token_ids[:-1], 7])
    results = replayer.replay([recorded, wrong])
    assert [each.is_equal for each in results] == [not is_exact, False]
    assert [each.num_tokens for each in results] == [2 * NUMBER_OF_TOKENS] * 2
    assert results[1].differences[0].what == f"token {NUMBER_OF_TOKENS - 1}"


@pytest.mark.parametrize("place", [0, 5, NUMBER_OF_TOKENS - 1])
def test_the_first_other_token_is_shown_with_the_likeliest(
    replayer: Replayer, recorded: RecordedRequest, place: int
) -> None:
    right = recorded.outputs[1].token_ids
    wrong = [*right[:place], (right[place] + 1) % 2048, *right[place + 1 :]]
    result = one(replayer, with_output(recorded, 1, token_ids=wrong))
    (found,) = result.differences
    assert (found.index, found.what, found.token) == (1, f"token {place}", place)
    assert (found.recorded, found.replayed) == (str(wrong[place]), str(right[place]))
    assert found.recorded_top is not None
    assert list(found.recorded_top) == [wrong[place]]
    assert found.replayed_top is not None
    assert len(found.replayed_top) >= 5
    assert right[place] in found.replayed_top
    assert not result.is_equal
    assert str(right[place]) in in_words(found.replayed_top)


def test_other_ends_texts_and_log_probabilities_are_differences(replayer: Replayer, recorded: RecordedRequest) -> None:
    output = recorded.outputs[0]
    row = output.logprobs[0]
    values = [-9.0, *torch.frombuffer(bytearray(row.sampled), dtype=torch.float32).tolist()[1:]]
    for changes, what in (
        ({"stop_reason": "x"}, "stop reason"),
        ({"text": "x"}, "text"),
        ({"logprobs": [replace(row, sampled=floats(values))]}, "log probabilities of token 0"),
        (
            {"prompt_logprobs": [replace(output.prompt_logprobs[0], start=2)]},
            "log probabilities of the prompt's token 2",
        ),
    ):
        result = one(replayer, with_output(recorded, 0, **changes))
        assert [each.what for each in result.differences] == [what]


def test_an_output_that_ended_too_early_or_late_differs_there(replayer: Replayer, recorded: RecordedRequest) -> None:
    ids = recorded.outputs[0].token_ids
    changes: dict[str, Any] = {"token_ids": ids[:4], "finish_reason": "stop", "logprobs": []}
    (found,) = one(replayer, with_output(recorded, 0, **changes)).differences
    assert (found.what, found.recorded) == ("token 4", "nothing: the output had ended")
    limited = {**recorded.sampling_params, "max_tokens": 4}
    changed = replace(with_output(recorded, 0, finish_reason="stop"), sampling_params=limited)
    found, *_ = one(replayer, changed).differences
    assert (found.what, found.replayed) == ("token 4", "nothing: the output had ended")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_of_an_output_that_was_cut_short_the_tokens_count(
    replayer: Replayer, recorded: RecordedRequest, reason: str
) -> None:
    params = {**recorded.sampling_params, "min_tokens": 9}
    ids = recorded.outputs[0].token_ids[:5]
    record = replace(with_output(recorded, 0, token_ids=ids, finish_reason=reason, logprobs=[]), sampling_params=params)
    assert one(replayer, record).is_equal
    half = replace(with_output(recorded, 0, token_ids=ids[:1], logprobs=[]), is_half=True)
    assert one(replayer, half).is_equal


def test_a_limit_that_the_context_set_is_that_of_the_record(replayer: Replayer, recorded: RecordedRequest) -> None:
    params = {name: value for name, value in recorded.sampling_params.items() if name != "max_tokens"}
    assert one(replayer, replace(recorded, sampling_params=params)).is_equal


def test_what_cannot_be_replayed_says_why(replayer: Replayer, recorded: RecordedRequest) -> None:
    for record, reason in (
        (replace(recorded, left_out=["images and sounds"]), "images and sounds are not recorded"),
        (with_output(recorded, 0, weights=["aa", "bb"]), "its weights were replaced while it ran"),
        (replace(recorded, outputs=[replace(recorded.outputs[0], token_ids=[])]), "it has generated no token"),
        (replace(recorded, sampling_params={"unheard_of": 1}), "its parameters are not those of this release"),
        (replace(recorded, prompt=[1] * 250), "256"),
        (replace(recorded, sampling_params={"max_tokens": 12}), "it has no seed"),
        (replace(recorded, adapter="ab" * 32), "adapter"),
    ):
        (result, beside) = replayer.replay([record, recorded])
        assert reason in result.refusal, record
        assert not result.is_equal
        assert beside.is_equal, "the others are replayed"


def test_other_versions_are_told_by_name(replayer: Replayer, recorded: RecordedRequest) -> None:
    ours = replayer._fingerprint
    assert replayer.explain(replace(recorded, release="0.1")) == [f"release: recorded by 0.1, this is {__version__}"]
    assert replayer.explain(replace(recorded, tokenizer="00")) == [
        "tokenizer: its files differ from those of the record"
    ]
    assert replayer.explain(with_output(recorded, 0, weights=["12" * 32])) == [
        f"weights: recorded {'12' * 8}, here {ours.weights.hex()[:16]}"
    ]
    numerics = ours.numerics.replace("float32", "bfloat16")
    leg = replace(recorded.outputs[0].legs[0], numerics=numerics, kv_layout="other")
    assert replayer.explain(with_output(recorded, 0, legs=[leg])) == [
        f"numerics: recorded {numerics}, here {ours.numerics}: only the record has bfloat16 and only this process has "
        "float32",
        *(
            note
            for note in replayer.explain(with_output(recorded, 0, legs=[leg]))[1:]
            if note.startswith("kv_layout: recorded other, here ")
        ),
    ]
    assert replayer.explain(with_output(recorded, 0, is_mixed=True)) == [
        "numerics: engines that compute in different ways have computed this request"
    ]


@pytest.mark.parametrize(
    ("numerics", "options"),
    [
        ("cpu/float32/cpu/torch-2", {"dtype": "float32"}),
        (
            "cpu/bfloat16/int4/tokenwise/by-group/torch-2",
            {"dtype": "bfloat16", "quantization": "int4", "batch_invariant": True},
        ),
        ("hash", {}),
    ],
)
def test_options_come_from_the_recorded_numerics(
    recorded: RecordedRequest, numerics: str, options: dict[str, Any]
) -> None:
    assert options_of(with_output(recorded, 0, numerics=numerics)) == options
    assert options_of(replace(recorded, outputs=[])) == {}


def test_a_request_with_an_adapter_comes_again_where_it_is_loaded(recorded: RecordedRequest, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", DEMO_MODEL, rank=8, seed=1)
    options = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 64}
    replayer = Replayer("tokenloom-demo", {**options, "enable_lora": True, "lora_modules": (f"a={adapter}",)})
    try:
        engine = replayer._engine
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": PROMPT}, params, lora_request=LoRARequest("a", 1, str(adapter)))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        token_ids = outputs[0].outputs[0].token_ids  # type: ignore[index,union-attr]
        output = RecordedOutput(index=0, token_ids=token_ids, finish_reason="length")
        digest = engine.client.call_utility("list_loras")[0][0][1]  # type: ignore[index]
        params_of_record = {"max_tokens": 8, "temperature": 0.0}
        adapted = replace(recorded, adapter=digest.hex(), outputs=[output], sampling_params=params_of_record)
        first, second = replayer.replay([adapted, replace(adapted, adapter="")])
        assert first.is_equal, first
        assert second.differences, "the base model has other tokens"
    finally:
        replayer.close()


@pytest.mark.parametrize(
    ("numerics", "threads", "named"),
    [
        ("cpu/bfloat16/flash/torch-2.13.0", 2, {"num_threads": 2}),
        ("cpu/bfloat16/flash/torch-2.13.0", 0, {}),  # of an older release
        ("cpu/bfloat16/tokenwise/torch-2.13.0", 2, {}),
        ("cpu/float32/flash/torch-2.13.0", 2, {}),
    ],
)
def test_where_tokens_may_follow_the_number_of_threads_it_is_that_of_the_record(
    replayer: Replayer, recorded: RecordedRequest, numerics: str, threads: int, named: dict[str, int]
) -> None:
    leg = replace(recorded.outputs[0].legs[0], numerics=numerics, num_threads=threads)
    record = replace(recorded, outputs=[replace(recorded.outputs[0], numerics=numerics, legs=[leg])])
    assert {name: value for name, value in options_of(record).items() if name == "num_threads"} == named
    assert ("threads: recorded 2, here 1" in replayer.explain(record)) == bool(named)
