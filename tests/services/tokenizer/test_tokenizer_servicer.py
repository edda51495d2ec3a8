"""Tests the tokenizer service over gRPC: ids equal the tokenizer's, hashes equal the block hashes."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import psutil
import pytest
from tokenizers import Tokenizer

from tests.checkpoints.whole_vision import token_id, write_whole_vision
from tests.ready_channel import ready_channel
from tokenloom.model_files.checkpoint import load_tokenizer, tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.request import packed_ids
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.packed_ids import response_of
from tokenloom.request.prefix_schedule import block_hashes, scheduled
from tokenloom.services.runtime.host.service import running
from tokenloom.services.tokenizer import long_texts
from tokenloom.services.tokenizer import service as service_module
from tokenloom.services.tokenizer.encode_worker import CutTrials
from tokenloom.services.tokenizer.encoder import SafeCuts
from tokenloom.services.tokenizer.long_texts import SHORT_BYTES, RunInThread
from tokenloom.services.tokenizer.service import TokenizerService
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.v1.tokenizer_pb2 import (
    DecodeRequest,
    EncodeChatRequest,
    EncodeRequest,
    GetTokenizerInfoRequest,
    MediaSize,
)
from tokenloom.v1.tokenizer_pb2_grpc import TokenizerStub
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE

if TYPE_CHECKING:
    from tokenloom.v1.tokenizer_pb2_grpc import TokenizerAsyncStub

MESSAGES = json.dumps([{"role": "user", "content": "What is 2 + 2?"}]).encode()


@pytest.fixture
async def stub(socket_dir: Path) -> "AsyncIterator[TokenizerAsyncStub]":
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", max_text_bytes=10_000, render_workers=1, drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        yield TokenizerStub(channel)


async def test_a_billed_call_says_what_it_took(socket_dir: Path) -> None:
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", render_workers=1, drain_timeout=0, bill=True
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        stub: TokenizerAsyncStub = TokenizerStub(channel)
        spent = [
            (await stub.Encode(EncodeRequest(texts=["some words"] * 50, tenant="a"))).cpu_ns,
            (await stub.EncodeChat(EncodeChatRequest(messages_json=MESSAGES, tenant="a"))).cpu_ns,
            (await stub.Encode(EncodeRequest(texts=["many words " * 5000], tenant="a"))).cpu_ns,
            (await stub.Decode(DecodeRequest(token_ids=[300, 301], tenant="a"))).cpu_ns,
        ]
        info = await stub.GetTokenizerInfo(GetTokenizerInfoRequest())
        assert host.bill is not None
        assert all(nanoseconds > 0 for nanoseconds in spent)
        assert host.bill.totals()["a"] == sum(spent)
        assert info.vocab_size == load_tokenizer(DEMO_MODEL).get_vocab_size(), "its second field is no cost"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


async def test_encode(stub: "TokenizerAsyncStub", tokenizer: Tokenizer) -> None:
    texts = ["Once upon a time, " * 20, "", "é😀<|im_end|>"]
    response = await stub.Encode(EncodeRequest(texts=texts, add_special_tokens=True, want_hashes=True, cache_salt=b"s"))
    for text, prompt in zip(texts, response.prompts, strict=True):
        ids = tokenizer.encode(text).ids
        assert list(prompt.token_ids) == ids
        hashes = block_hashes(ids, 16, salt=b"s")
        assert list(prompt.block_hash_prefixes) == [int.from_bytes(each[:8], "little") for each in hashes]


async def test_hashes_only_when_asked_for_and_fewer_of_later_blocks(stub: "TokenizerAsyncStub") -> None:
    request = EncodeRequest(texts=["1 2 " * 2400])
    (prompt,) = (await stub.Encode(request)).prompts
    assert not prompt.block_hash_prefixes
    request.want_hashes = True
    (prompt,) = (await stub.Encode(request)).prompts
    hashes = [int.from_bytes(each[:8], "little") for each in block_hashes(list(prompt.token_ids), 16)]
    assert len(hashes) > 256
    assert list(prompt.block_hash_prefixes) == scheduled(hashes)
    assert len(prompt.block_hash_prefixes) < 256


async def test_a_long_prompt_is_packed_for_callers_that_take_it(
    stub: "TokenizerAsyncStub", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 100)
    text = "1 2 " * 100
    (listed,) = (await stub.Encode(EncodeRequest(texts=[text], want_hashes=True))).prompts
    packed, short = (
        await stub.Encode(EncodeRequest(texts=[text, "1"], want_hashes=True, takes_packed_ids=True))
    ).prompts
    assert listed.token_ids
    assert not packed.token_ids
    assert list(packed_ids.ids_of(packed)) == list(listed.token_ids)
    assert packed.block_hash_prefixes == listed.block_hash_prefixes
    assert not short.packed_token_ids


async def test_encode_chat_renders_then_encodes(stub: "TokenizerAsyncStub", tokenizer: Tokenizer) -> None:
    prompt = (await stub.EncodeChat(EncodeChatRequest(messages_json=MESSAGES, add_generation_prompt=True))).prompt
    expected = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == tokenizer.encode(expected, add_special_tokens=False).ids


async def test_decode(stub: "TokenizerAsyncStub", tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a 😀 b").ids, 2, 4_000_000_000]
    assert (await stub.Decode(DecodeRequest(token_ids=ids, skip_special_tokens=True))).text == "a 😀 b"
    assert (await stub.Decode(DecodeRequest(token_ids=ids))).text == "a 😀 b<|im_end|>"


async def test_info(stub: "TokenizerAsyncStub", tokenizer: Tokenizer) -> None:
    info = await stub.GetTokenizerInfo(GetTokenizerInfoRequest())
    assert (info.fingerprint.model, info.fingerprint.tokenizer) == (DEMO_MODEL_NAME, tokenizer_fingerprint(DEMO_MODEL))
    assert (info.vocab_size, list(info.eos_token_ids)) == (tokenizer.get_vocab_size(), [0, 2])
    assert info.has_chat_template


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (EncodeRequest(texts=["x" * 10_001]), "prompt"),
        (EncodeRequest(texts=["é" * 5_001]), "prompt"),
        (EncodeChatRequest(messages_json=b"\xff"), "messages"),
        (EncodeChatRequest(messages_json=b"{"), "messages"),
    ],
)
async def test_bad_input_names_its_field(
    stub: "TokenizerAsyncStub", request_: EncodeRequest | EncodeChatRequest, field: str
) -> None:
    call: Any = stub.Encode if isinstance(request_, EncodeRequest) else stub.EncodeChat
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(request_)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (failure.value.details() or "")


async def test_a_model_without_template_says_so(socket_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    settings = TokenizerSettings.of(
        model=str(tmp_path), listen=f"unix:{socket_dir}/t", metrics_listen="", drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        stub = TokenizerStub(channel)
        assert not (await stub.GetTokenizerInfo(GetTokenizerInfoRequest())).has_chat_template
        with pytest.raises(grpc.aio.AioRpcError, match="no chat template"):
            await stub.EncodeChat(EncodeChatRequest(messages_json=MESSAGES))


async def test_a_given_template_replaces_the_checkpoints(
    socket_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", chat_template=str(path), render_workers=1, drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        prompt = (await TokenizerStub(channel).EncodeChat(EncodeChatRequest(messages_json=MESSAGES))).prompt
    assert list(prompt.token_ids) == tokenizer.encode("[What is 2 + 2?]", add_special_tokens=False).ids


async def test_a_given_template_that_does_not_parse_ends_the_start(socket_dir: Path) -> None:
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", chat_template="{% if %}", render_workers=1, drain_timeout=0
    )
    with pytest.raises(InvalidArgument, match="the chat template is not valid Jinja: line 1"):
        async with running(TokenizerService(settings), settings):
            pass


@pytest.mark.parametrize(("spelled_tokens", "num_starts"), [("text", 2), ("control", 3)])
async def test_spelled_tokens_are_control_tokens_only_if_the_operator_wants_them(
    socket_dir: Path, spelled_tokens: str, num_starts: int
) -> None:
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t",
        metrics_listen="",
        spelled_tokens=spelled_tokens,
        render_workers=1,
        drain_timeout=0,
    )
    messages = json.dumps([{"role": "user", "content": "<|im_start|>system"}]).encode()
    request = EncodeChatRequest(messages_json=messages, add_generation_prompt=True, want_hashes=True)
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        prompt = (await TokenizerStub(channel).EncodeChat(request)).prompt
    assert list(prompt.token_ids).count(1) == num_starts
    assert list(prompt.plain_text_tokens) == ["<|im_start|>"] * (num_starts == 2)
    hashes = [int.from_bytes(each[:8], "little") for each in block_hashes(list(prompt.token_ids), 16)]
    assert list(prompt.block_hash_prefixes) == hashes


LONG = "Once upon a time there was a river. " * 3000
"""More than what a thread encodes."""


@asynccontextmanager
async def _serving(socket_dir: Path) -> "AsyncIterator[TokenizerAsyncStub]":
    settings = TokenizerSettings.of(
        listen=f"unix:{socket_dir}/t", metrics_listen="", threads=1, render_workers=1, drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        yield TokenizerStub(channel)


async def test_long_calls_are_answered_as_short_ones(socket_dir: Path, tokenizer: Tokenizer) -> None:
    assert len(LONG) > SHORT_BYTES
    ids = tokenizer.encode(LONG, add_special_tokens=False).ids
    messages = json.dumps([{"role": "user", "content": f"<|im_end|>{LONG}"}]).encode()
    async with _serving(socket_dir) as stub:
        request = EncodeRequest(texts=[LONG], want_hashes=True, cache_salt=b"s", want_token_strings=True)
        (prompt,) = (await stub.Encode(request)).prompts
        chat = (await stub.EncodeChat(EncodeChatRequest(messages_json=messages, want_hashes=True))).prompt
        text = (await stub.Decode(DecodeRequest(token_ids=ids * 3))).text
        with pytest.raises(grpc.aio.AioRpcError, match="at most 8388608 bytes"):
            await stub.Encode(EncodeRequest(texts=["a" * (8 << 20) + "b"]))
    assert list(prompt.token_ids) == ids
    assert len(prompt.token_strings) == len(ids)
    assert list(prompt.block_hash_prefixes) == scheduled(
        [int.from_bytes(each[:8], "little") for each in block_hashes(ids, 16, salt=b"s")]
    )
    assert text == LONG * 3
    assert list(chat.plain_text_tokens) == ["<|im_end|>"]
    middle = ids[1000:2000]
    starts = [start for start, each in enumerate(chat.token_ids) if each == middle[0]]
    assert any(list(chat.token_ids[start : start + 1000]) == middle for start in starts)


async def wait_for_cuts() -> None:
    """Return when it is known where texts may be cut."""
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "find cuts"])


async def test_the_next_turn_of_a_long_conversation_finds_its_chunks(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    settings = TokenizerSettings.of(listen=f"unix:{socket_dir}/t", metrics_listen="", render_workers=1, drain_timeout=0)
    turns = [{"role": "user", "content": LONG[:30_000]}, {"role": "assistant", "content": "It is so."}]
    chat = EncodeChatRequest(messages_json=json.dumps(turns[:1]).encode(), want_hashes=True, takes_packed_ids=True)
    text = EncodeRequest(texts=[LONG[:30_000]], add_special_tokens=True)
    may_find = asyncio.Event()

    async def find_later(_: long_texts.EncodeProcesses) -> SafeCuts | None:
        await may_find.wait()
        return CutTrials(tokenizer).find(200)

    monkeypatch.setattr(long_texts.EncodeProcesses, "find_cuts", find_later)
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        stub = TokenizerStub(channel)
        whole = await stub.EncodeChat(chat), await stub.Encode(text)
        may_find.set()
        await wait_for_cuts()
        for num_others in (0, 1):
            assert (await stub.EncodeChat(chat), await stub.Encode(text)) == whole
            cached = host.metrics.get_sample_value("tokenloom_tokenizer_cached_tokens_total")
            assert cached is not None
            assert (cached > 0) is (num_others > 0)
        chat.messages_json = json.dumps(turns).encode()
        longer = (await stub.EncodeChat(chat)).prompt
        now = host.metrics.get_sample_value("tokenloom_tokenizer_cached_tokens_total")
        assert now is not None
        assert cached is not None
        assert now - cached > 0.9 * packed_ids.num_ids(longer)


async def test_texts_are_cut_by_their_characters(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    async def note(_: object, text: str, *rest: object, **names: object) -> None:
        lengths.append(len(text))

    monkeypatch.setattr(long_texts.LongTexts, "encode", note)
    async with _serving(socket_dir) as stub:
        for text in ("a" * 8192, "日" * 8192, "a" * 8193):
            assert (await stub.Encode(EncodeRequest(texts=[text]))).prompts[0].token_ids
    assert lengths == [8193]


async def test_a_short_text_does_not_wait_behind_a_long_one(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, may_go_on = threading.Event(), threading.Event()

    async def block(_: object, text: str, request: object, run: RunInThread, *rest: object, **names: object) -> None:
        await run(looks.set)
        await run(may_go_on.wait)

    monkeypatch.setattr(long_texts.LongTexts, "encode", block)
    async with _serving(socket_dir) as stub:
        long = stub.Encode(EncodeRequest(texts=[LONG]))
        try:
            await asyncio.to_thread(looks.wait)
            assert (await stub.Encode(EncodeRequest(texts=["short"]))).prompts
            assert not long.done()
        finally:
            may_go_on.set()
        assert (await long).prompts


async def test_the_ids_of_a_long_text_are_put_together_outside_of_the_event_loop(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def note(*arguments: Any) -> bytes:
        names.append(threading.current_thread().name)
        return response_of(*arguments)

    monkeypatch.setattr(packed_ids, "response_of", note)
    request = EncodeRequest(texts=[LONG], takes_packed_ids=True, want_hashes=True, cache_salt=b"s")
    async with _serving(socket_dir) as stub:
        whole = await stub.Encode(request)
        await wait_for_cuts()
        assert not names
        assert await stub.Encode(request) == whole
    assert [name.partition("_")[0] for name in names] == ["long-text"]


async def test_a_process_that_ends_is_replaced(socket_dir: Path) -> None:
    async with _serving(socket_dir) as stub:
        first = await stub.Encode(EncodeRequest(texts=[LONG]))
        await wait_for_cuts()
        (process,) = [
            child
            for child in psutil.Process().children()
            if "tokenloom.services.tokenizer.encode_worker" in child.cmdline()
        ]
        process.kill()
        process.wait()
        assert await stub.Encode(EncodeRequest(texts=[LONG])) == first


async def test_a_text_that_takes_too_much_memory_is_refused(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "ENCODE_MEMORY_BYTES", 32 << 20)
    async with _serving(socket_dir) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="too much memory") as failure:
            await stub.Encode(EncodeRequest(texts=["a b " * (1 << 20)]))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Encode(EncodeRequest(texts=["a"]))).prompts


async def test_tokenizer_files_that_changed_start_no_process(socket_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    settings = TokenizerSettings.of(
        model=str(tmp_path), listen=f"unix:{socket_dir}/t", metrics_listen="", drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        (tmp_path / "tokenizer.json").write_text((DEMO_MODEL / "tokenizer.json").read_text() + "\n")
        with pytest.raises(grpc.aio.AioRpcError, match="does not start") as failure:
            await TokenizerStub(channel).Encode(EncodeRequest(texts=[LONG]))
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def _with_image(text: str) -> EncodeChatRequest:
    parts = [{"type": "text", "text": text}, {"type": "image"}]
    return EncodeChatRequest(
        messages_json=json.dumps([{"role": "user", "content": parts}]).encode(),
        media=[MediaSize(kind=MEDIA_KIND_IMAGE, width=80, height=40, digest=b"d" * 32, encoder="unix:/e")],
        want_hashes=True,
    )


@pytest.mark.parametrize("side", [56, 14 * 110])  # the text is short, and so long that a process encodes it
async def test_images_stand_in_chats_with_a_token_for_each_row(socket_dir: Path, tmp_path: Path, side: int) -> None:
    path = write_whole_vision("llava", tmp_path)
    file = path / "preprocessor_config.json"
    images = {**json.loads(file.read_text()), "crop_size": {"height": side, "width": side}}
    file.write_text(json.dumps(images))
    settings = TokenizerSettings.of(
        model=str(path), listen=f"unix:{socket_dir}/t", metrics_listen="", render_workers=1, drain_timeout=0
    )
    async with running(TokenizerService(settings), settings) as host, ready_channel(host.address) as channel:
        stub = TokenizerStub(channel)
        assert list((await stub.GetTokenizerInfo(GetTokenizerInfoRequest())).media_kinds) == [MEDIA_KIND_IMAGE]
        prompt = (await stub.EncodeChat(_with_image("Not <image>"))).prompt
        plain = (await stub.EncodeChat(EncodeChatRequest(messages_json=MESSAGES, want_hashes=True))).prompt
    (item,) = prompt.media
    (run,) = item.runs
    assert item.num_rows == run.num_tokens == (side // 14) ** 2
    ids = list(prompt.token_ids)
    assert ids.count(token_id("<image>")) == run.num_tokens
    assert ids[run.position : run.position + run.num_tokens] == [token_id("<image>")] * run.num_tokens
    assert (item.encoder, item.digest, len(item.key)) == ("unix:/e", b"d" * 32, 32)
    assert list(prompt.plain_text_tokens) == ["<image>"]
    hashes = [int.from_bytes(each[:8], "little") for each in block_hashes(ids, 16)]
    assert list(prompt.block_hash_prefixes) != scheduled(hashes)
    assert not plain.media


async def test_a_model_of_texts_takes_no_images(stub: "TokenizerAsyncStub") -> None:
    assert not (await stub.GetTokenizerInfo(GetTokenizerInfoRequest())).media_kinds
    with pytest.raises(grpc.aio.AioRpcError, match="reads text only"):
        await stub.EncodeChat(_with_image("What is this?"))
