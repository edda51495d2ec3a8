"""Lists the routes of OpenAI's Responses API."""

from ..http.app import Routes
from .responses_endpoint import ResponsesEndpoint


def response_routes(responses: ResponsesEndpoint) -> Routes:
    return {
        "/v1/responses": {"POST": responses},
        "/v1/responses/*": {"GET": responses.retrieve, "DELETE": responses.delete},
        "/v1/responses/*/cancel": {"POST": responses.cancel},
    }
