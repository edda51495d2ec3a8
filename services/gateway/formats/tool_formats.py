"""Lists the formats of tool calls, by the names that operators use."""

from collections.abc import Mapping

from ..formats import hermes, llama3_json, mistral
from ..formats.hermes import HermesParser
from ..formats.llama3_json import Llama3JsonParser
from ..formats.tool_parser import ToolFormat

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), marks=hermes.MARKS),
    "llama3_json": ToolFormat(Llama3JsonParser, keeps_special_tokens=True, marks=llama3_json.MARKS),
    "mistral": ToolFormat(
        lambda names: mistral.MistralParser(), keeps_special_tokens=True, new_call_id=mistral.new_call_id
    ),
}
