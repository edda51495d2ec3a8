"""Tests vectors, classes and scores through the Python clients."""

import asyncio

import pytest

from tests.services.gateway.fakes import FakeMesh
from tokenloom.client import AsyncClient, Client
from tokenloom.request import errors
from tokenloom.services.gateway.grpc import other_calls


async def test_the_clients_return_arrays(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_calls, "_MESSAGE_BYTES", 8)  # so that each result takes a message or more
    async with AsyncClient(mesh.grpc_address, timeout=30) as client:
        vectors = await client.embed(["abc", "de"], dimensions=2)
        assert [array.tolist() for array in vectors.arrays] == [[3, 97], [2, 100]]
        assert (vectors.prompt_tokens, vectors.cached_tokens) == (5, 2)
        assert (await client.embed([[5, 6]])).arrays[0].tolist() == [2, 5]
        (rows,) = (await client.pool(["ab"], "token_embed")).arrays
        assert rows.tolist() == [[97, 97], [98, 98]]
        (classes,) = (await client.classify(["a"])).arrays
        assert classes.tolist() == pytest.approx([1 / 98, 97 / 98])
        scores = await client.score("a", ["a", "a"])
        assert [array.shape for array in scores.arrays] == [(), ()]
        with pytest.raises(errors.InvalidArgument, match="its pooling tasks are"):
            await client.pool(["a"], "token_classify")
    with Client(mesh.grpc_address, timeout=30) as blocking:
        assert (await asyncio.to_thread(blocking.embed, ["abc"])).arrays[0].tolist() == [3, 97]
