"""Work that many connections cause at once is spread over turns of the event loop."""

import asyncio
import itertools

from tests.loop_clock import settle
from tests.services.gateway.http.server.raw_connection import Connection
from tokenloom.services.gateway.http.turn_share import TurnShare

REQUEST = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


async def test_each_turn_has_its_share_and_the_rest_waits_in_order() -> None:
    share = TurnShare(3)
    done: list[int] = []

    async def piece(number: int) -> None:
        await share.wait()
        done.append(number)

    pieces = [asyncio.ensure_future(piece(number)) for number in range(9)]
    counts = [0]
    for _ in range(20):
        await asyncio.sleep(0)
        counts.append(len(done))
    await asyncio.gather(*pieces)
    assert done == list(range(9))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 3


async def test_a_piece_that_is_cancelled_holds_nothing_up() -> None:
    share = TurnShare(1)
    pieces = [asyncio.ensure_future(share.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    pieces[1].cancel()
    await asyncio.wait_for(pieces[2], 10)
    await settle()
    assert share.take()


async def test_reads_of_many_connections_are_parsed_over_several_turns() -> None:
    share = TurnShare(2)
    connections = [Connection(reads=False, turns=share) for _ in range(5)]
    for connection in connections:
        connection.send(REQUEST)
    assert [connection.parser.num_bytes > 0 for connection in connections] == [True, True, False, False, False]
    assert [connection.protocol.flow.read_paused for connection in connections] == [False, False, True, True, True]
    assert connections[4].protocol.idle_seconds is None, "it is not closed to make room"
    connections[4].protocol._on_framing_timeout()
    assert not connections[4].transport.is_closed, "the client is not late: the gateway is"
    connections[3].transport.close()
    await settle()
    assert [connection.statuses for connection in connections] == [[200], [200], [200], [], [200]]
    assert not any(
        connection.protocol.flow.read_paused for connection in connections if not connection.transport.is_closed
    )
