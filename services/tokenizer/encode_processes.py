"""Encodes long texts in processes that are started when the first such text comes."""

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper

from .encode_worker import EncodeJob, EncodeReply, EncodeSetup

_SECONDS = 120.0
_START_SECONDS = 60.0


class EncodeProcesses:
    """Shares a few processes. The callers take turns before they call."""

    def __init__(self, setup: EncodeSetup, num_processes: int) -> None:
        async def start() -> HelperProcess:
            packed = msgspec.msgpack.encode(setup)
            return await start_helper(f"{__package__}.encode_worker", packed, _response, _START_SECONDS)

        self._pool = HelperPool(start, num_processes, "encode the text", _SECONDS)

    async def run(self, job: EncodeJob) -> bytes:
        """Return the response of a call.

        Raises ``InvalidArgument`` for a text that the tokenizer refuses, and as :meth:`.HelperPool.run`.
        """
        return _response(await self._pool.run(msgspec.msgpack.encode(job)))

    async def close(self) -> None:
        """End the processes. Call this when nothing is encoded any more."""
        await self._pool.close()


def _response(data: bytes) -> bytes:
    reply = msgspec.msgpack.decode(data, type=EncodeReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, reply.field or None)
    return reply.response
