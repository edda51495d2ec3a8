"""Shows the last requests to operators."""

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Routes
from ..openapi import route_table
from ..request_log.finished_request import LastRequests
from ..request_log.recent_requests import RecentRequests


def request_routes(recent: RecentRequests) -> Routes:
    """Return ``GET /requests``: the last requests of this gateway."""

    async def last_requests(exchange: HttpExchange) -> None:
        await exchange.respond(200, encode_json(LastRequests(list(recent))))

    return {route_table.LAST_REQUESTS: last_requests}
