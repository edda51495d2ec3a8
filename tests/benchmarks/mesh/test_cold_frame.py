"""`bench.mesh.cold_frame` over a few frames."""

from tokenloom.bench.mesh.cold_frame import FrameCase, FrameOutputs, frames_of, run_case
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.output_processor_pb2 import ProcessFrame


async def test_each_frame_becomes_the_text_of_its_tokens() -> None:
    case = FrameCase(rows=3, tokens=2, frames=4)
    vocabulary = Vocabulary(load_tokenizer(DEMO_MODEL))
    outputs = FrameOutputs(vocabulary, case.rows)
    sent = [ProcessFrame.FromString(outputs.pass_on(frame)) for frame in frames_of(case)]
    assert [list(frame.token_index) for frame in sent] == [[0] * 3, [1] * 3, [3] * 3, [5] * 3, [7] * 3]
    for frame in sent:
        assert list(frame.slot) == [1, 2, 3]
        assert "".join(frame.text) == vocabulary.decode(frame.token_ids, True) != ""


async def test_frames_and_lines_are_timed_after_each_way_to_wait() -> None:
    report = await run_case(FrameCase(rows=2, frames=3, sleep_ms=0.01, other_mib=1))
    assert list(report) == ["another", "0.01 ms of sleep", "1 MiB overwritten"]
    assert all(figures["frame_us"] > 0 and figures["line_ns"] > 0 for figures in report.values())
