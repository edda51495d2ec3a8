"""``tokenloom replay`` computes past requests again, and compares what comes with what was recorded."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import msgpack

from .failures import FAILED, CommandFailed, reported
from .options import engine_options, offers, parsed

if TYPE_CHECKING:
    from tokenloom.offline.replay import OutputDifference, Replayed
    from tokenloom.request.request_records import DamagedLine, RecordedRequest

_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?:-[0-9]+)?(?![0-9a-f])")
"""In an id that answers and their items carry, such as cmpl-… and message_…_0: the request's own."""
_AT_ONCE = 256
"""Requests that are computed together."""


@offers(engine_options())
def replay(
    request_id: Annotated[str, typer.Argument(help="The id of an answer, with its prefix or without.")] = "",
    record_dir: Annotated[
        Path | None,
        typer.Option(help="The folder of --request-record-dir.", envvar="TOKENLOOM_REQUEST_RECORD_DIR"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory, GGUF file or hub id; by default as recorded.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Replay all requests, the newest file first.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="With --all: so many at most.")] = None,
    **engine: Any,
) -> None:
    """Compute past requests again from their records, and say whether the same tokens come: status 0 if all do."""
    if every == bool(request_id):
        raise typer.BadParameter("give the id of one request, or --all", param_hint="REQUEST_ID")
    if limit is not None and not every:
        raise typer.BadParameter("is only of use with --all", param_hint="--limit")
    if record_dir is None:
        raise typer.BadParameter("is missing: the folder of --request-record-dir", param_hint="--record-dir")
    with reported():
        faults: list[DamagedLine] = []
        # Packed: as objects, records take eight times the bytes of their files.
        records = [msgpack.encode(each) for each in _records(record_dir, request_id, limit, faults)]
        num_results = num_equal = 0
        for result in _replayed(records, model, parsed(engine)):
            num_results += 1
            num_equal += result.is_equal
        for fault in faults:
            typer.secho(f"{fault.place} {fault.reason}", fg="red", err=True)
        if every:
            print(f"equal requests: {num_equal} of {num_results}; damaged lines: {len(faults)}")
        if num_equal < num_results or faults:
            raise typer.Exit(FAILED)


def _records(
    folder: Path, request_id: str, limit: int | None, faults: "list[DamagedLine]"
) -> "Iterator[RecordedRequest]":
    """Yield the records that are asked for, and add the lines that are none to ``faults``. Raises `CommandFailed` if
    there are neither."""
    # Imported here, because the help does not need numpy.
    from tokenloom.request.request_records import DamagedLine, read_records

    found = _ID.search(request_id)
    wanted = found[0] if found else request_id
    num_found = 0
    for each in read_records(folder, wanted):
        if isinstance(each, DamagedLine):
            faults.append(each)
            continue
        yield each
        num_found += 1
        if num_found == limit:
            return
    if num_found or faults:
        return
    if not request_id:
        raise CommandFailed(f"{folder} holds no records; name the folder of --request-record-dir")
    damaged = sum(isinstance(each, DamagedLine) for each in read_records(folder))
    also = f"; it has damaged lines: {damaged}, which --all names" if damaged else ""
    raise CommandFailed(f"{folder} has no record of {request_id}{also}")


def _replayed(records: Iterable[bytes], model: str | None, given: Mapping[str, Any]) -> "Iterator[Replayed]":
    """Replay packed records, each group with the model and the options that its records name, and print what becomes of
    each. Raises `CommandFailed` if a model cannot be loaded."""
    # Imported here because it imports torch.
    from tokenloom.offline.replay import Replayer, options_of
    from tokenloom.request.request_records import RecordedRequest

    groups: dict[str, tuple[str, dict[str, Any], list[bytes]]] = {}
    for packed in records:
        record = msgpack.decode(packed, type=RecordedRequest)
        path, options = model or record.path, {**options_of(record), **given}
        groups.setdefault(repr((path, options)), (path, options, []))[2].append(packed)
    for path, options, group in groups.values():
        try:
            replayer = Replayer(path, options)
        except ValueError as error:
            raise CommandFailed(f"{path}: {error}") from None
        with contextlib.closing(replayer):
            for start in range(0, len(group), _AT_ONCE):
                part = [msgpack.decode(each, type=RecordedRequest) for each in group[start : start + _AT_ONCE]]
                for result in replayer.replay(part):
                    _print(result)
                    yield result


def _print(result: "Replayed") -> None:
    """Print what explains a difference, then whether there is one."""
    record = result.record
    for note in result.notes:
        print(f"{record.id}: {note}")
    if result.refusal:
        print(f"{record.id}: cannot be replayed: {result.refusal}")
    elif result.is_equal:
        print(f"{record.id}: equal (outputs: {len(record.outputs)}, tokens: {result.num_tokens})")
    for difference in result.differences:
        print("\n".join(_lines(record, difference)))
    if result.differences and result.may_follow_threads and not record.num_threads:
        print(f"{record.id}: sums may follow the number of threads, which is not recorded: try --num-threads 1")


def _lines(record: "RecordedRequest", difference: "OutputDifference") -> Iterable[str]:
    from tokenloom.offline.replay import SHOWN, in_words

    where = f"{record.id}: output {difference.index} differs, {difference.what}"
    yield f"{where}: recorded {difference.recorded}, replayed {difference.replayed}"
    for name, top in (("recorded", difference.recorded_top), ("replayed", difference.replayed_top)):
        if top is not None:
            yield f"  {name}: {in_words(dict(islice(top.items(), SHOWN + 1)))}"
        elif difference.token is not None:
            yield f"  {name}: log probabilities were not asked for"
    output = next(each for each in record.outputs if each.index == difference.index)
    for leg in output.legs:
        preempted = f", preempted at {', '.join(map(str, leg.preempted_at))}" if leg.preempted_at else ""
        yield f"  {leg.kind} on {leg.engine} from token {leg.start}{preempted}"
