"""Lists the routes of Anthropic's Messages API."""

from collections.abc import Mapping

from ..http.app import Routes
from ..http.endpoint import GenerationEndpoint
from ..http.error_form import ErrorForm
from .count_tokens import CountTokens
from .error_body import error_body

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
_FORM = ErrorForm(error_body, event_name=b"error")
ERROR_FORMS: Mapping[str, ErrorForm] = {MESSAGES: _FORM, COUNT_TOKENS: _FORM}


def message_routes(messages: GenerationEndpoint, count_tokens: CountTokens) -> Routes:
    return {MESSAGES: {"POST": messages}, COUNT_TOKENS: {"POST": count_tokens}}
