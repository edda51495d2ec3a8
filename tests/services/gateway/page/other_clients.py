"""Gives a mesh something to do while a page is looked at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import httpx

from tests.plain_text import PLAIN_TEXT
from tests.services.gateway.page.chromium import SECONDS

NUM_CLIENTS = 3


@asynccontextmanager
async def other_clients(url: str, key: str) -> AsyncIterator[None]:
    """Let clients ask a mesh for long answers, one after the other, while the ``with`` block runs."""

    async def ask(client: httpx.AsyncClient, random: Random) -> None:
        while True:
            body = {
                "messages": [
                    {"role": "user", "content": f"What is {random.randint(1, 9)} plus {random.randint(1, 9)}?"}
                ],
                "max_tokens": random.randint(50, 500),
                "ignore_eos": True,
            }
            await client.post("/v1/chat/completions", json=body)  # whatever the answer: an engine is killed meanwhile

    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=SECONDS, verify=PLAIN_TEXT) as client:
        clients = [asyncio.create_task(ask(client, Random(seed))) for seed in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
