"""Tokenizers of each family, trained or written here, and an output processor among fakes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.ready_channel import ready_channel
from tests.services.output_processor.fakes import (
    LIMITS,
    SOON,
    FakeCoordinator,
    FakeEngine,
    serve_coordinator,
    serve_engine,
)
from tests.services.output_processor.harness import Mesh
from tokenloom.model_files.checkpoint import load_tokenizer, tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.streams import slotted_stream as server_stream
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

CORPUS = [
    "the quick brown fox jumps over the lazy dog.",
    "naïve café, 日本語のテキスト, 😀👩‍👩‍👧 and 🇩🇪!",
    "  spaces\n\n\ttabs",
] * 4
ADDED = [AddedToken("<|im_end|>", special=True), AddedToken("<tool_call>", special=False), AddedToken("<é>")]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: BPE over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def llama_bpe() -> Tokenizer:
    """Llama 2, Mistral: BPE with byte fallback, one space stripped from the start of a text."""
    words = ["<s>", *_byte_tokens(), "▁", *"abcdefghijklmnopqrstuvwxyz.,!é", "▁t", "th", "▁th", "▁the", "▁▁"]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def gemma_unigram() -> Tokenizer:
    """Gemma-like: Unigram with byte fallback, no strip."""
    words = ["<unk>", *_byte_tokens(), "▁", *"abcdefghijklmnopqrstuvwxyz.,!é", "▁the", "▁quick", "日本"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i + 1)) for i, word in enumerate(words)], 0, True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def metaspace() -> Tokenizer:
    """T5-like: Unigram with the metaspace decoder."""
    words = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.,!é😀", "▁the", "▁quick", "fox"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i + 1)) for i, word in enumerate(words)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens(ADDED)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT-like: the decoder looks at neighbours, so nothing can be tabulated."""
    words = ["[UNK]", "the", "quick", "fox", "##es", "##s", "!", ".", "do", "n't", "'", "a", "##a", "é"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens(ADDED)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_bpe": llama_bpe,
    "gemma_unigram": gemma_unigram,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


@pytest.fixture(params=TOKENIZERS, scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def llama_tokenizer() -> Tokenizer:
    return llama_bpe()


@pytest.fixture
def hang_timeout() -> float:
    return 60.0


@pytest.fixture
def heartbeat() -> float:
    return 60.0  # so that what should come at once does not just come with a heartbeat


@pytest.fixture
def roles() -> list[EngineRole]:
    """Of the engines."""
    return [EngineRole.ENGINE_ROLE_BOTH] * 2


@pytest.fixture
def numerics() -> str:
    """Of the engines."""
    return ""


@pytest.fixture
def settings() -> dict[str, Any]:
    """More of the output processor's."""
    return {}


@pytest.fixture
async def mesh(
    socket_dir: Path,
    roles: list[EngineRole],
    hang_timeout: float,
    heartbeat: float,
    settings: dict[str, Any],
    numerics: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Mesh]:
    monkeypatch.setattr(server_stream, "HEARTBEAT_SECONDS", heartbeat)
    tokenizer = tokenizer_fingerprint(DEMO_MODEL)
    fingerprint = Fingerprint(model=DEMO_MODEL_NAME, tokenizer=tokenizer, numerics=numerics)
    engines = [
        FakeEngine(
            EngineIdentity(
                engine_id=f"engine-{i}",
                epoch=11 + i,
                address=f"unix:{socket_dir}/e{i}",
                fingerprint=fingerprint,
                limits=LIMITS,
            )
        )
        for i in range(len(roles))
    ]
    coordinator = FakeCoordinator([engine.identity for engine in engines], roles)
    servers = [serve_engine(engine) for engine in engines]
    all_settings = OutputProcessorSettings.of(
        listen=f"unix:{socket_dir}/op",
        metrics_listen="",
        coordinator=f"unix:{socket_dir}/co",
        drain_timeout=0,
        engine_hang_timeout=hang_timeout,
        **settings,
    )
    async with AsyncExitStack() as stack, serve_coordinator(socket_dir / "co", coordinator):
        for server in servers:
            await stack.enter_async_context(server)
        host = await stack.enter_async_context(running(OutputProcessorService(all_settings), all_settings))
        channel = await stack.enter_async_context(ready_channel(host.address))
        await asyncio.wait_for(coordinator.watched.wait(), SOON)
        mesh = Mesh(engines, servers, coordinator, channel, load_tokenizer(DEMO_MODEL), host)
        yield mesh
        for gateway in mesh.gateways:
            gateway.close()
