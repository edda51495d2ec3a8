"""anthropic: a picture in a message, in a stream, in a second turn, and its tokens."""

import anthropic
from shown import ANSWER, BASE64, MODEL, QUESTION, SECOND_ANSWER, SECOND_QUESTION, URL

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
messages = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
asked = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}

message = client.messages.create(messages=messages, **asked)
assert message.content[0].text == ANSWER
with client.messages.stream(messages=messages, **asked) as stream:
    assert stream.get_final_text() == ANSWER
conversation = [*messages, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND_QUESTION}]
assert client.messages.create(messages=conversation, **asked).content[0].text == SECOND_ANSWER
counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
usage = message.usage
assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
try:
    broken = {"type": "image", "source": {**picture["source"], "data": BASE64[:100]}}
    client.messages.create(messages=[{"role": "user", "content": [broken]}], **asked)
except anthropic.BadRequestError as error:
    assert "image" in str(error), error
else:
    raise AssertionError("half a picture was accepted")
print(f"messages, a stream, a second turn, count_tokens ({counted}), an error")
