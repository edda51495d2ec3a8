"""Shows the last requests to operators."""

from ..encoding.sse import encode_json
from ..http.app import Routes
from ..http.http_exchange import HttpExchange
from ..request_log.finished_request import LastRequests
from ..request_log.recent_requests import RecentRequests


def request_routes(recent: RecentRequests) -> Routes:
    """Return ``GET /requests``: the last requests of this gateway."""

    async def last_requests(exchange: HttpExchange) -> None:
        await exchange.respond(200, encode_json(LastRequests(list(recent))))

    return {"/requests": {"GET": last_requests}}
