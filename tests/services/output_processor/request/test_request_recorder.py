"""Requests that end are recorded: what a record holds, and what a disk that takes none does to requests."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services.output_processor.fakes import LENGTH, SOON, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import DECODE, PREFILL, part
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import AdmissionLimit
from tokenloom.request.request_records import RecordedRequest, RecordFiles, from_floats, read_records
from tokenloom.request.sampling_params import sample_seed
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.request import request_recorder
from tokenloom.services.output_processor.request.request_recorder import place_of
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.output_processor.request.telemetry import Leg, OutputTrail
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import Finished, SlotLogprobs
from tokenloom.v1.output_processor_pb2 import SampleJournal
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, Logprobs, StructuredOutputs

ID = "0" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


@pytest.fixture
def settings(folder: Path) -> dict[str, Any]:
    return {"request_record_dir": folder}


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def counted(mesh: Mesh, outcome: str) -> float:
    name = "tokenloom_output_processor_request_records_total"
    return mesh.host.metrics.get_sample_value(name, {"outcome": outcome}) or 0.0


async def record(mesh: Mesh, folder: Path, count: int = 1) -> RecordedRequest:
    """Wait for so many records, and return the last one."""
    await until(lambda: counted(mesh, "written") == count)
    found = list(read_records(folder))
    assert len(found) == count
    assert isinstance(found[-1], RecordedRequest)
    return found[-1]


async def answered(mesh: Mesh, gateway: Any, slot: int, **fields: Any) -> None:
    """Run a request of one token."""
    await gateway.send(submit=[submit(slot, **fields)])
    if not hasattr(mesh, "stream"):
        mesh.stream = await mesh.engines[0].next_stream()  # type: ignore[attr-defined]
    stream = mesh.stream  # type: ignore[attr-defined]
    (add,) = await stream.next_adds(1)
    stream.send((add.slot, 0, [65]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=1)])
    assert (await gateway.until_finished(slot))[2].reason == LENGTH


async def test_what_a_record_holds(mesh: Mesh, folder: Path) -> None:
    gateway = await mesh.gateway()
    asked = submit(
        1,
        (5, 6, 7),
        seed=2**64 - 1,
        temperature=0.7,
        min_tokens=1,
        logprobs=1,
        prompt_logprobs=0,
        logit_bias={9: 0.5},
        structured_outputs=StructuredOutputs(regex="a+"),
        stop=["never"],
        tenant="t",
    )
    asked.request_id = ID
    stream, (slot,) = await mesh.started(gateway, asked)
    of_prompt = Logprobs(sampled=[-1.0, -2.0], rank=[1, 2])
    of_token = Logprobs(sampled=[-0.1], rank=[1], top=1, token_id=[65], logprob=[-0.1])
    stream.send(
        (slot, 0, [65]),
        logprobs=[
            SlotLogprobs(slot=slot, prompt=True, token_index=1, logprobs=of_prompt),
            SlotLogprobs(slot=slot, token_index=0, logprobs=of_token),
        ],
    )
    end = Finished(slot=slot, reason=LENGTH, num_output_tokens=2, preempted_at=[1], cached_tokens=2)
    stream.send((slot, 1, [66]), logprobs=[SlotLogprobs(slot=slot, token_index=1, logprobs=of_token)], finished=[end])
    await gateway.until_finished(1)
    found = await record(mesh, folder)
    assert (found.id, found.tenant, found.model, found.prompt) == (ID, "t", "tokenloom-demo", [5, 6, 7])
    assert found.prompt_text is None
    assert found.began_ms <= found.ended_ms
    assert {name: found.sampling_params[name] for name in ("seed", "temperature", "structured_outputs")} == {
        "seed": str(2**64 - 1),
        "temperature": 0.7,
        "structured_outputs": {"regex": "a+"},
    }
    assert found.text_options == {"stop": ["never"]}
    (output,) = found.outputs
    assert (output.token_ids, output.finish_reason, output.cached_tokens, output.text) == ([65, 66], "length", 2, None)
    (columns,) = output.logprobs  # of two frames
    assert (columns.start, columns.ranks, columns.top, columns.token_ids) == (0, [1, 1], 1, [65, 65])
    assert from_floats(columns.sampled) == pytest.approx([-0.1, -0.1])
    (columns,) = output.prompt_logprobs
    assert (columns.start, from_floats(columns.sampled)) == (1, [-1.0, -2.0])
    (leg,) = output.legs
    assert (leg.engine, leg.kind, leg.start, leg.preempted_at) == ("engine-0", "whole", 0, [1])


async def test_a_request_that_another_engine_continues_names_both(mesh: Mesh, folder: Path) -> None:
    gateway = await mesh.gateway()
    stream, (first,) = await mesh.started(gateway, submit(1))
    stream.send((first, 0, [65, 66]))
    await gateway.next_frame()
    stream.die()
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    other.send((add.slot, 2, [67]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=3)])
    await gateway.until_finished(1)
    (output,) = (await record(mesh, folder)).outputs
    assert [(leg.engine, leg.kind, leg.start) for leg in output.legs] == [
        ("engine-0", "whole", 0),
        ("engine-1", "whole", 2),
    ]
    assert output.token_ids == [65, 66, 67]


@pytest.mark.parametrize("roles", [[PREFILL, DECODE]])
async def test_a_request_of_two_engines_has_two_legs(mesh: Mesh, folder: Path, roles: list[EngineRole]) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1)])
    prefill = await part(mesh, 0)
    prefill.stream.prefilled(prefill.slot, 0, [65])
    decode = await part(mesh, 1)
    decode.stream.send(
        (decode.slot, 1, [66]),
        finished=[Finished(slot=decode.slot, reason=LENGTH, num_output_tokens=2, preempted_at=[1, 1])],
    )
    await gateway.until_finished(1)
    (output,) = (await record(mesh, folder)).outputs
    assert [(leg.engine, leg.kind, leg.start, leg.preempted_at) for leg in output.legs] == [
        ("engine-0", "prefill", 0, []),
        ("engine-1", "decode", 1, [1, 1]),
    ]


async def test_samples_are_one_record_and_what_a_lost_output_processor_sent_is_told(mesh: Mesh, folder: Path) -> None:
    journals = [
        SampleJournal(sample_index=0, token_ids=[65], finished=True),
        SampleJournal(sample_index=1, token_ids=[65, 66]),
    ]
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3, seed=9, journals=journals)])
    stream = await mesh.engines[0].next_stream()
    adds = await stream.next_adds(2)
    stream.send((adds[0].slot, 2, [67]), (adds[1].slot, 0, [68]))
    ends = [Finished(slot=add.slot, reason=LENGTH, num_output_tokens=n) for add, n in zip(adds, (3, 1), strict=True)]
    stream.send(finished=ends)
    found = await record(mesh, folder)
    assert [(each.index, each.token_ids, each.num_given) for each in found.outputs] == [
        (1, [65, 66, 67], 2),
        (2, [68], 0),
    ]
    assert found.sampling_params["seed"] == "9"
    assert adds[0].sampling_params.seed == sample_seed(9, 1)


async def test_an_aborted_request_is_recorded_as_such(mesh: Mesh, folder: Path) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send((slot, 0, [65]))
    await gateway.next_frame()
    await gateway.send(cancel_slots=[1])
    (output,) = (await record(mesh, folder)).outputs
    assert (output.finish_reason, output.token_ids) == ("abort", [65])


class TestTexts:
    @pytest.fixture
    def settings(self, folder: Path) -> dict[str, Any]:
        return {"request_record_dir": folder, "request_record_text": True}

    async def test_texts_are_recorded_by_choice(self, mesh: Mesh, folder: Path) -> None:
        gateway = await mesh.gateway()
        prompt, output = mesh.ids("The dog é"), mesh.ids(" Once upon")
        stream, (slot,) = await mesh.started(gateway, submit(1, prompt))
        end = Finished(slot=slot, reason=LENGTH, num_output_tokens=len(output))
        stream.send((slot, 0, output), finished=[end])
        await gateway.until_finished(1)
        found = await record(mesh, folder)
        assert (found.prompt_text, found.outputs[0].text) == ("The dog é", " Once upon")


class TestOff:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {}

    async def test_nothing_is_kept_or_counted(self, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
        samples: list[SampleOutput] = []
        original = SampleOutput.__init__

        def observed(self: SampleOutput, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            samples.append(self)

        monkeypatch.setattr(SampleOutput, "__init__", observed)
        gateway = await mesh.gateway()
        await answered(mesh, gateway, 1, logprobs=1)
        (sample,) = samples
        assert (sample.trail, sample._kept_logprobs) == (None, None)
        assert counted(mesh, "written") == counted(mesh, "dropped") == 0.0


async def test_a_full_disk_loses_no_request(
    mesh: Mesh, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_recorder, "CALM_SECONDS", 0.0)
    gateway = await mesh.gateway()
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(RecordFiles, "write", full)
        for slot in (1, 2, 3):
            await answered(mesh, gateway, slot)
        await until(lambda: counted(mesh, "dropped") == 3)
        await until(lambda: mesh.host.fall_backs.of(""))
        assert mesh.host.fall_backs.of("") == {"unrecorded": "No space left on device"}
    await answered(mesh, gateway, 4)
    assert (await record(mesh, folder)).id == "request-4"
    await until(lambda: not mesh.host.fall_backs.of(""))
    assert [line.getMessage() for line in caplog.records if "unrecorded" in line.getMessage()] == [
        "fall-back unrecorded: Requests that end are not recorded: the folder of --request-record-dir takes too few or "
        "none. (No space left on device)"
    ]


async def test_a_slow_disk_holds_a_bounded_number_of_requests(
    mesh: Mesh, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), RecordFiles.write
    monkeypatch.setattr(RecordFiles, "write", lambda self, line: (go_on.wait(SOON), write(self, line))[1])
    monkeypatch.setattr(request_recorder, "MOST_WAITING_BYTES", 30_000)
    monkeypatch.setattr(request_recorder, "CALM_SECONDS", 0.0)
    gateway = await mesh.gateway()
    try:
        for slot in (1, 2, 3):  # small ones count with what Python takes for them
            await answered(mesh, gateway, slot)
        assert counted(mesh, "dropped") == 1
        assert mesh.host.fall_backs.of("") == {"unrecorded": "the disk is slower than the requests"}
    finally:
        go_on.set()
    await until(lambda: counted(mesh, "written") == 2)
    await answered(mesh, gateway, 4)
    await until(lambda: counted(mesh, "written") == 3 and not mesh.host.fall_backs.of(""))


class TestRoom:
    @pytest.fixture
    def settings(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(request_recorder, "MOST_LOGPROB_BYTES", 100)
        return {"request_record_dir": folder}

    async def test_log_probabilities_beyond_the_room_are_left_out(self, mesh: Mesh, folder: Path) -> None:
        gateway = await mesh.gateway()
        await gateway.send(submit=[submit(1, logprobs=0)])
        stream = await mesh.engines[0].next_stream()
        counts = [1, 20, *[3] * 10]  # tokens; of twenty there is no room, and what ended leaves its own
        for slot, count in enumerate(counts, 1):
            if slot > 1:
                await gateway.send(submit=[submit(slot, logprobs=0)])
            (add,) = await stream.next_adds(1)
            columns = Logprobs(sampled=[-0.1] * count, rank=[1] * count)
            stream.send(
                (add.slot, 0, [65] * count),
                logprobs=[SlotLogprobs(slot=add.slot, token_index=0, logprobs=columns)],
                finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=count)],
            )
            assert len((await gateway.until_finished(slot))[1]) == count
            await until(lambda: counted(mesh, "written") == slot)  # noqa: B023
        found = [each.outputs[0] for each in read_records(folder) if isinstance(each, RecordedRequest)]
        assert [len(each.token_ids) for each in found] == counts
        assert [each.lacks_logprobs for each in found] == [count == 20 for count in counts]
        assert [len(each.logprobs) for each in found] == [int(count != 20) for count in counts]


async def test_a_disk_that_takes_every_second_record_is_one_fall_back(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, refuses = RecordFiles.write, iter([True, False] * 4)

    def every_second(files: RecordFiles, line: bytes) -> None:
        if next(refuses):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(files, line)

    monkeypatch.setattr(RecordFiles, "write", every_second)
    gateway = await mesh.gateway()
    for slot in range(1, 9):
        await answered(mesh, gateway, slot)
        await until(lambda: counted(mesh, "written") + counted(mesh, "dropped") == slot)  # noqa: B023
    assert counted(mesh, "written") == counted(mesh, "dropped") == 4
    assert mesh.host.fall_backs.of("") == {"unrecorded": "Input/output error"}
    assert sum("unrecorded" in line.getMessage() for line in caplog.records) == 1


async def test_a_record_that_fails_is_dropped_alone(
    mesh: Mesh, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await mesh.gateway()
    with monkeypatch.context() as patch:
        patch.setattr(request_recorder, "sealed", lambda record: 1 / 0)
        for slot in (1, 2):
            await answered(mesh, gateway, slot)
        await until(lambda: counted(mesh, "dropped") == 2)
    await answered(mesh, gateway, 3)
    assert (await record(mesh, folder)).id == "request-3"
    assert sum("a request cannot be recorded" in line.getMessage() for line in caplog.records) == 1


class TestLarge:
    @pytest.fixture
    def settings(self, folder: Path) -> dict[str, Any]:
        return {"request_record_dir": folder, "request_record_bytes": 1 << 20}

    async def test_a_record_beyond_half_of_the_bound_is_not_written(
        self, mesh: Mesh, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        gateway = await mesh.gateway()
        for slot in (1, 2):
            await answered(mesh, gateway, slot, prompt=[2000] * 900, stop=["x" * 600_000])
        await answered(mesh, gateway, 3)
        assert (await record(mesh, folder)).id == "request-3"
        assert counted(mesh, "dropped") == 2
        assert sum("half of --request-record-bytes" in line.getMessage() for line in caplog.records) == 1


async def test_what_waits_is_written_before_the_process_ends(
    socket_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = OutputProcessorSettings.of(
        listen=f"unix:{socket_dir}/o",
        metrics_listen="",
        coordinator=f"unix:{socket_dir}/nobody",
        request_record_dir=folder,
    )
    service = OutputProcessorService(settings)
    async with running(service, settings):
        recorder = service.requests.recorder
        assert recorder is not None
        for slot in range(20):
            recorder.add(submit(slot), [], 0)
    assert sum(isinstance(each, RecordedRequest) for each in read_records(folder)) == 20
    recorder.add(submit(21), [], 0)  # too late, and harmless


@pytest.mark.parametrize("name", ["a file", "below"])
async def test_a_folder_that_cannot_be_used_is_named_at_the_start(socket_dir: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    folder = tmp_path / "a file" / "below" if name == "below" else tmp_path / name
    settings = OutputProcessorSettings.of(
        listen=f"unix:{socket_dir}/o",
        metrics_listen="",
        coordinator=f"unix:{socket_dir}/nobody",
        request_record_dir=folder,
    )
    with pytest.raises(InvalidArgument, match=f"--request-record-dir: {folder} cannot be used"):
        async with running(OutputProcessorService(settings), settings):
            raise AssertionError("it has started")


def test_texts_need_a_folder() -> None:
    with pytest.raises(ValueError, match="--request-record-text needs --request-record-dir"):
        OutputProcessorSettings.of(coordinator="unix:/c", request_record_text=True)


def test_a_model_is_named_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert place_of("model") == str(tmp_path / "model")
    assert place_of("org/model") == "org/model"


def test_a_leg_that_waited_for_another_one_begins_where_that_ended() -> None:
    trail = OutputTrail(AdmissionLimit(100))
    serves = Fingerprint()
    engines = [EngineIdentity(engine_id=f"engine-{number}") for number in range(2)]
    trail.legs += [Leg(engines[0], 1, "whole", 0, serves), Leg(engines[1], 1, "decode", 12, serves)]
    trail.note_start("engine-1", 1, 21)
    trail.note_start("engine-2", 1, None)
    assert [(leg.engine_id, leg.start) for leg in trail.legs] == [("engine-0", 0), ("engine-1", 21)]
    trail.note_start("engine-1", 1, None)  # it never took over
    assert [leg.engine_id for leg in trail.legs] == ["engine-0"]
