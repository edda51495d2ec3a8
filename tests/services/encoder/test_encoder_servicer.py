"""What gateways and engines get from an encoder, and what it refuses."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from tests.loop_clock import settle
from tests.services.encoder.fakes import WIDTH, FakeEncoder, digest_of, item_of
from tokenloom.request import errors
from tokenloom.services.encoder import encoder_servicer
from tokenloom.v1.encoder_pb2 import GetRequest, HasRequest, ReleaseFilesRequest, ResetCachesRequest
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MediaItem

NO_CONTEXT = cast(Any, None)


async def rows(encoder: FakeEncoder, item: MediaItem, **request: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    asked = GetRequest(item=item, **request)
    chunks = [chunk async for chunk in encoder.servicer.Get(asked, NO_CONTEXT)]
    return np.concatenate([np.frombuffer(each.rows, np.float32).reshape(each.num_rows, each.width) for each in chunks])


async def has(encoder: FakeEncoder, data: bytes, **owner: Any) -> bool:
    answer = await encoder.servicer.Has(HasRequest(digest=[digest_of(data)], **owner), NO_CONTEXT)
    assert answer.has[0] == (answer.facts[0].digest == digest_of(data))
    return answer.has[0]


async def test_rows_come_in_chunks_from_the_row_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FakeEncoder()
    facts = await encoder.put(b"image")
    assert (facts.width, facts.digest) == (5, digest_of(b"image"))
    monkeypatch.setattr(encoder_servicer, "CHUNK_BYTES", 2 * WIDTH * 4)
    chunks = [each async for each in encoder.servicer.Get(GetRequest(item=item_of(b"image"), first_row=1), NO_CONTEXT)]
    assert [(each.first_row, each.num_rows) for each in chunks] == [(1, 2), (3, 1)]
    assert (await rows(encoder, item_of(b"image"))).tolist() == [[5.0] * WIDTH] * 4


async def test_calls_for_one_key_share_a_computation() -> None:
    encoder = FakeEncoder()
    await encoder.put(b"image")
    encoder.maker.opened.clear()
    calls = [asyncio.create_task(rows(encoder, item_of(b"image"))) for _ in range(5)]
    await settle()
    calls[0].cancel()
    encoder.maker.opened.set()
    assert all(each.tolist() == [[5.0] * WIDTH] * 4 for each in await asyncio.gather(*calls[1:]))
    assert encoder.maker.num_made == 1
    await rows(encoder, item_of(b"image"))
    assert (encoder.cache.num_computed, encoder.cache.num_joined, encoder.cache.num_found) == (1, 4, 1)


async def test_a_computation_ends_with_the_last_call_that_waits() -> None:
    encoder = FakeEncoder()
    await encoder.put(b"image")
    encoder.maker.opened.clear()
    calls = [asyncio.create_task(rows(encoder, item_of(b"image"))) for _ in range(2)]
    await settle()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await settle()
    assert encoder.maker.num_running == 0
    encoder.maker.opened.set()
    assert len(await rows(encoder, item_of(b"image"))) == 4


@pytest.mark.parametrize("files", [False, True])
async def test_caches_are_forgotten_but_not_what_requests_need(files: bool) -> None:
    encoder = FakeEncoder()
    await encoder.put(b"image", request_id="r")
    await encoder.put(b"other")
    await rows(encoder, item_of(b"image"))
    await encoder.servicer.ResetCaches(ResetCachesRequest(files=files), NO_CONTEXT)
    assert await has(encoder, b"image", tenant="t")
    assert await has(encoder, b"other", tenant="t") is not files
    await rows(encoder, item_of(b"image"))
    assert encoder.maker.num_made == 2


@pytest.mark.parametrize("is_released", [False, True])
async def test_it_is_used_until_requests_have_ended_or_their_leases(
    monkeypatch: pytest.MonkeyPatch, is_released: bool
) -> None:
    monkeypatch.setattr(encoder_servicer, "LOOK_SECONDS", 0.0 if not is_released else 1000.0)
    encoder = FakeEncoder()
    await encoder.put(b"image", request_id="r")
    waiting = asyncio.create_task(encoder.servicer.until_unused())
    await settle()
    assert not waiting.done()
    if is_released:
        await encoder.servicer.ReleaseFiles(ReleaseFilesRequest(request_id="r", tenant="t"), NO_CONTEXT)
    else:
        encoder.now += 1000.0  # its gateway has died
    await asyncio.wait_for(waiting, 30)


async def test_not_more_images_are_computed_than_there_are_places() -> None:
    encoder = FakeEncoder()
    files = [b"image %d" % number for number in range(6)]
    for data in files:
        await encoder.put(data)
    encoder.maker.opened.clear()
    calls = [asyncio.create_task(rows(encoder, item_of(data))) for data in files]
    await settle()
    assert encoder.servicer.num_waiting == 6 - encoder.maker.num_places
    encoder.maker.opened.set()
    await asyncio.gather(*calls)
    assert encoder.maker.most_running <= encoder.maker.num_places


async def test_what_get_refuses() -> None:
    encoder = FakeEncoder()
    await encoder.put(b"image")
    with pytest.raises(errors.NotFound, match="put it again"):
        await rows(encoder, item_of(b"another"))
    with pytest.raises(errors.InvalidArgument, match="has 4 rows, and 5 tokens"):
        await rows(encoder, item_of(b"image", 5))
    with pytest.raises(errors.InvalidArgument, match="needs a key"):
        await rows(encoder, MediaItem())
    encoder.maker.opened.clear()
    request = GetRequest(item=MediaItem(key=b"late", num_rows=4, digest=digest_of(b"image")))
    request.timeout.FromMilliseconds(1)
    with pytest.raises(errors.DeadlineExceeded):
        await anext(aiter(encoder.servicer.Get(request, NO_CONTEXT)))
    assert encoder.servicer.num_calls == 0


@pytest.mark.parametrize(
    ("data", "header"),
    [
        (b"image", {"digest": b"x" * 32}),
        (b"image", {"digest": b""}),
        (b"image", {"num_bytes": 4}),
        (b"image", {"num_bytes": 6}),
        (b"image", {"num_bytes": 1 << 40}),
        (b"image", {"kind": MEDIA_KIND_AUDIO}),
        (b"", {}),
        (b"bad image", {}),
    ],
)
async def test_what_put_refuses(data: bytes, header: dict[str, Any]) -> None:
    encoder = FakeEncoder()
    with pytest.raises(errors.InvalidArgument):
        await encoder.put(data, **header)
    assert not await has(encoder, data, tenant="t")
    assert encoder.files.num_bytes == 0
    await encoder.put(b"fine")


async def test_a_tenant_learns_nothing_of_anothers_files() -> None:
    encoder = FakeEncoder()
    assert not await has(encoder, b"image", tenant="t")
    await encoder.put(b"image")
    assert await has(encoder, b"image", tenant="t")
    assert not await has(encoder, b"image", tenant="other")
    assert not await has(encoder, b"image", tenant="t", cache_salt=b"salt")
    await encoder.put(b"image", tenant="other")
    assert await has(encoder, b"image", tenant="other")
    assert len(encoder.files) == 1


async def test_a_released_file_makes_room() -> None:
    encoder = FakeEncoder(files_bytes=20_000)
    await encoder.put(b"a" * 9000, request_id="first")
    with pytest.raises(errors.ResourceExhausted, match="leave no room at the encoder"):
        await encoder.put(b"b" * 12_000, request_id="second", tenant="other")
    await encoder.servicer.ReleaseFiles(ReleaseFilesRequest(tenant="t", request_id="first"), NO_CONTEXT)
    await encoder.put(b"b" * 12_000, request_id="second", tenant="other")
    assert not await has(encoder, b"a" * 9000, tenant="t")


async def test_files_of_urls_are_fetched_where_that_is_allowed() -> None:
    class Fetcher:
        async def fetch(self, url: str, max_bytes: int | None = None) -> bytes:
            return url.encode()

    header = {"url": "https://host/a.png", "digest": b"", "num_bytes": 0}
    encoder = FakeEncoder(fetcher=Fetcher())
    facts = await encoder.put(b"", **header)
    assert facts.digest == digest_of(b"https://host/a.png")
    assert len(await rows(encoder, item_of(b"https://host/a.png"))) == 4
    with pytest.raises(errors.PermissionDenied, match="allowed-media-domains"):
        await FakeEncoder().put(b"", **header)
