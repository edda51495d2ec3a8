"""Send several requests at a time through the asyncio client. Run ``tokenloom serve`` first."""

import argparse
import asyncio

from tokenloom.client import AsyncClient, errors

QUESTIONS = ("What is prefix caching?", "What is a KV block?", "What is continuous batching?")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    args = parser.parse_args()
    async with AsyncClient(args.address, timeout=60) as client:
        asking = [client.chat([{"role": "user", "content": question}], temperature=0) for question in QUESTIONS]
        for question, answer in zip(QUESTIONS, await asyncio.gather(*asking), strict=True):
            print(f"{question}\n  {answer.text}")
        try:
            await client.generate("x", temperature=-1)
        except errors.InvalidArgument as error:
            print(f"refused: {error.field}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main())
