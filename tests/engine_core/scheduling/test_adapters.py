"""Which adapters are loaded, and who gets a slot."""

import contextlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engine_core.adapter_dirs import make_adapter
from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker, tokens_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.errors import ExecutorFailedError, WorkerLostError
from tokenloom.engine_core.data.lora import LoraErrorKind, LoraInfo
from tokenloom.engine_core.data.messages import EngineCoreRequest, ErrorKind
from tokenloom.engine_core.data.request import Request
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_row import HashLoras
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.scheduling.adapters import MAX_PASSES, Adapters
from tokenloom.request.adapter_names import adapter_salt


class Store:
    """Reads adapters from a dict of paths; ``held`` are those in memory."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.held: list[bytes] = []

    def load(self, path: str) -> LoraInfo:
        if path not in self.files:
            raise ValueError(f"{path}: No such file or directory")
        self.held.append(self.files[path])
        return LoraInfo(self.files[path], 4)

    def drop(self, digest: bytes) -> None:
        self.held = [each for each in self.held if each != digest]


A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def make_adapters(max_loras: int = 2, max_cpu_loras: int = 2) -> tuple[Adapters, Store]:
    store = Store(a=A, b=B, c=C)
    return Adapters(LoraConfig(enable=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras), store), store


def request_with(adapter: bytes, request_id: str = "r", **fields: object) -> EngineCoreRequest:
    request = make_request(request_id, [1, 2, 3], **fields)  # type: ignore[arg-type]
    request.adapter, request.cache_salt = adapter, adapter_salt(b"", adapter)
    return request


def make_core(tmp_path: Path, names: str, max_loras: int = 1, **options: object) -> tuple[EngineCore, list[bytes]]:
    digests = [make_adapter(tmp_path / name) for name in names]
    modules = tuple(f"{name}={tmp_path / name}" for name in names)
    config = make_config(**options)  # type: ignore[arg-type]
    config = replace(config, lora=LoraConfig(enable=True, max_loras=max_loras, modules=modules))
    return EngineCore(config, UniProcExecutor(make_worker(config))), digests


def names_of(adapters: Adapters) -> list[str]:
    return [state.name for state in adapters.answer().adapters]


def test_a_loaded_adapter_is_loaded_once() -> None:
    adapters, store = make_adapters()
    for digest in (b"", b"", A):
        assert not adapters.load("one", "a", digest).error
    assert store.held == [A]
    assert adapters.serves(A)


@pytest.mark.parametrize(
    ("name", "path", "digest", "kind"),
    [
        ("two", "absent", b"", LoraErrorKind.INVALID),
        ("", "a", b"", LoraErrorKind.INVALID),
        ("two", "b", A, LoraErrorKind.CONFLICT),
        ("one", "b", b"", LoraErrorKind.CONFLICT),
    ],
)
def test_a_refused_load_leaves_everything_as_it_was(name: str, path: str, digest: bytes, kind: LoraErrorKind) -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    answer = adapters.load(name, path, digest)
    assert answer.error
    assert answer.kind is kind
    assert names_of(adapters) == ["one"]
    assert store.held == [A]


def test_the_least_recently_used_adapter_makes_room() -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    adapters.load("two", "b")
    live = _live(adapters, A)
    adapters.ended(live)
    adapters.load("three", "c")
    assert names_of(adapters) == ["one", "three"]
    assert store.held == [A, C]


def test_adapters_that_are_pinned_or_in_use_stay() -> None:
    adapters, _ = make_adapters()
    adapters.load("one", "a")
    adapters.load("two", "b")
    assert not adapters.pin("one", True).error
    live = _live(adapters, B)
    assert adapters.load("three", "c").kind is LoraErrorKind.FULL
    adapters.ended(live)
    assert not adapters.load("three", "c").error
    assert names_of(adapters) == ["one", "three"]


def test_all_slots_but_one_may_be_pinned() -> None:
    adapters, _ = make_adapters()
    adapters.load("one", "a")
    adapters.load("two", "b")
    assert not adapters.pin("one", True).error
    assert adapters.pin("two", True).kind is LoraErrorKind.FULL
    assert [state.pinned for state in adapters.answer().adapters] == [True, False]
    adapters.pin("one", False)
    assert not adapters.pin("two", True).error
    assert adapters.pin("absent", True).kind is LoraErrorKind.NOT_FOUND


def test_an_unloaded_adapter_stays_in_memory_until_its_requests_end() -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    live = _live(adapters, A)
    assert not adapters.unload("one").error
    assert not adapters.serves(A)
    assert store.held == [A]
    adapters.ended(live)
    assert store.held == [A], "no worker is called while requests change"
    adapters.drop_unneeded()
    assert store.held == []
    assert adapters.unload("one").kind is LoraErrorKind.NOT_FOUND


def test_a_drop_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    with monkeypatch.context() as patch:
        patch.setattr(store, "drop", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            adapters.unload("one")
    assert store.held == [A]
    adapters.drop_unneeded()
    assert store.held == []


def test_an_adapter_that_was_loaded_again_before_it_was_dropped_stays() -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    live = _live(adapters, A)
    adapters.unload("one")
    adapters.ended(live)
    adapters.load("one", "a")
    adapters.drop_unneeded()
    assert store.held[-1] == A
    assert adapters.serves(A)


def test_an_adapter_is_replaced_in_place() -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    live = _live(adapters, A)
    assert not adapters.load("one", "b", in_place=True).error
    assert (adapters.serves(A), adapters.serves(B)) == (False, True)
    adapters.ended(live)
    adapters.drop_unneeded()
    assert store.held == [B]


def test_two_names_share_an_adapter() -> None:
    adapters, store = make_adapters()
    adapters.load("one", "a")
    adapters.load("other", "a")
    adapters.unload("one")
    assert adapters.serves(A)
    adapters.unload("other")
    assert store.held == []


def test_states_are_reported_when_they_change(tmp_path: Path) -> None:
    core, (a, _) = make_core(tmp_path, "ab", max_loras=2)
    assert core.adapters is not None
    assert [state.name for state in core.ready.loras] == ["a", "b"]
    core.add_request(request_with(a))
    loras = core.step().scheduler_stats.loras  # type: ignore[union-attr]
    assert loras is not None
    assert [(each.name, each.num_running, each.in_slot) for each in loras] == [("a", 1, True), ("b", 0, False)]
    assert core.step().scheduler_stats.loras is None  # type: ignore[union-attr]
    finish(core)
    assert core.stats().loras is None, "the last step has reported it"


def test_tokens_are_those_of_the_adapter(tmp_path: Path) -> None:
    core, digests = make_core(tmp_path, "abc", max_loras=2, num_blocks=12, budget=16)
    requests = [request_with(each, f"{i}") for i, each in enumerate([*digests, b"", *digests])]
    for request in requests:
        core.add_request(request)
    outputs = finish(core)
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, 5, VOCAB_SIZE, request.adapter)
        assert tokens_of(outputs[request.request_id]) == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_a_request_whose_adapter_is_not_loaded_may_go_elsewhere(tmp_path: Path, enabled: bool) -> None:
    config = replace(make_config(), lora=LoraConfig(enable=enabled))
    core = EngineCore(config, UniProcExecutor(make_worker(config)))
    core.add_request(request_with(A))
    (output,) = finish(core)["r"]
    assert output.error_kind is ErrorKind.NO_ADAPTER
    assert not core.scheduler.requests


def test_other_requests_pass_over_a_waiting_adapter_but_not_for_ever(tmp_path: Path) -> None:
    """The queue A, B, A, A, A … with one slot."""
    core, (a, b) = make_core(tmp_path, "ab", num_blocks=4000, max_num_seqs=4)
    order = [a, b] + [a] * 300
    for number, adapter in enumerate(order):
        core.add_request(request_with(adapter, str(number), max_tokens=2 + number % 7))
    started = _starts(core)
    position = started.index("1")
    assert position == MAX_PASSES + 1, "those that are behind it keep the slot busy, but not for ever"
    assert started[:position] == [str(number) for number in [0, *range(2, position + 1)]]
    assert len(started) == len(order)


def test_requests_without_an_adapter_pass_over(tmp_path: Path) -> None:
    core, (a, b) = make_core(tmp_path, "ab", num_blocks=400)
    for number, adapter in enumerate([a, b, b"", b""]):
        core.add_request(request_with(adapter, str(number), max_tokens=9))
    assert _starts(core) == ["0", "2", "3", "1"]


def test_a_pinned_adapter_keeps_its_slot(tmp_path: Path) -> None:
    core, (a, b, c) = make_core(tmp_path, "abc", max_loras=2)
    assert core.adapters is not None
    core.adapters.pin("a", True)
    for number, adapter in enumerate([b, c, a]):
        core.add_request(request_with(adapter, str(number), max_tokens=9))
    assert _starts(core) == ["0", "2", "1"], "only one slot is left for the others"


def test_new_workers_load_the_adapters_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, (a, b) = make_core(tmp_path, "ab", max_loras=2)
    assert core.adapters is not None
    for number, adapter in enumerate([a, b]):
        core.add_request(request_with(adapter, str(number)))
    core.step()
    make_adapter(tmp_path / "b", rank=5)  # other files
    worker = core.executor._worker  # type: ignore[attr-defined]

    def replace_workers() -> None:
        worker._rows.clear()
        worker._cache[:] = -1
        worker._loras = HashLoras(LoraConfig(enable=True, max_loras=2))

    monkeypatch.setattr(core.executor, "replace_workers", replace_workers)
    core.replace_workers()
    outputs = finish(core)
    assert tokens_of(outputs["0"])[-1] == expected_tokens([1, 2, 3], 5, VOCAB_SIZE, a)[-1]
    assert outputs["1"][-1].error_kind is ErrorKind.NO_ADAPTER
    assert names_of(core.adapters) == ["a"]


@pytest.mark.parametrize("files", [{"b": B}, {"b": B, "a": C}])
def test_new_workers_keep_nothing_of_an_adapter_whose_files_have_changed(files: dict[str, bytes]) -> None:
    adapters, store = make_adapters()
    for name in "ab":
        adapters.load(name, name)
    store.files, store.held = files, [A]  # of a rank that could read it, unlike the others
    adapters.restore()
    adapters.drop_unneeded()
    assert names_of(adapters) == ["b"]
    assert store.held == [B]


@pytest.mark.parametrize(
    "error",
    [
        WorkerLostError("worker 1 ended with status -9"),
        ExecutorFailedError("worker 1: the device failed"),
        KeyboardInterrupt(),
    ],
)
def test_no_token_is_lost_when_dropping_an_adapter_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    core, (adapter,) = make_core(tmp_path, "a")
    assert core.adapters is not None
    core.add_request(make_request("plain", [5, 6, 7], 12))
    core.add_request(request_with(adapter, "lora", max_tokens=4))
    core.step()
    core.adapters.unload("a")
    _fail_once(core, monkeypatch, "drop_lora", error)
    tokens: dict[str, list[int]] = {"plain": [], "lora": []}
    while core.has_work():
        with contextlib.suppress(KeyboardInterrupt):
            for output in core.step().outputs:
                tokens[output.request_id] += output.new_token_ids
    assert tokens["plain"][-11:] == expected_tokens([5, 6, 7], 12, VOCAB_SIZE)[-11:]
    assert tokens["lora"][-3:] == expected_tokens([1, 2, 3], 4, VOCAB_SIZE, adapter)[-3:]
    assert not core.has_requests()


def test_an_abort_that_drops_an_adapter_survives_the_loss_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, (adapter,) = make_core(tmp_path, "a")
    assert core.adapters is not None
    core.add_request(request_with(adapter, "lora", max_tokens=4))
    core.step()
    core.adapters.unload("a")
    _fail_once(core, monkeypatch, "drop_lora", WorkerLostError("worker 1 ended with status -9"))
    core.abort_requests(["lora"])
    assert not core.has_requests()


def _fail_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    """Let the next call of a method of the workers fail."""
    call, errors = core.executor.collective_rpc, [error]

    def failing(name: str, *args: object) -> list[object]:
        if name == method and errors:
            raise errors.pop()
        return call(name, *args)

    monkeypatch.setattr(core.executor, "collective_rpc", failing)


def _interrupt(digest: bytes) -> None:
    raise KeyboardInterrupt


def _live(adapters: Adapters, digest: bytes) -> Request:
    request = Request(request_with(digest), 100, 0)
    adapters.added(request)
    return request


def _starts(core: EngineCore) -> list[str]:
    """Run to the end; return the requests in the order in which they began."""
    started: list[str] = []
    for _ in range(10_000):
        if not core.has_work():
            return started
        core.step()
        started += [each.request_id for each in core.scheduler.running if each.request_id not in started]
    raise AssertionError("still busy")
