"""openai: a picture in a chat, in a stream, in a second turn, in responses, and one that cannot be read."""

import openai
from shown import ANSWER, CONVERSATION, DATA_URL, MODEL, QUESTION, SECOND_ANSWER, SECOND_QUESTION, TURN, URL

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

whole = client.chat.completions.create(model=MODEL, messages=[TURN], temperature=0)
assert whole.choices[0].message.content == ANSWER
alone = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0)
assert "no picture" in alone.choices[0].message.content
rows = whole.usage.prompt_tokens - alone.usage.prompt_tokens
assert rows > 1, "a picture counts as tokens of the prompt"
with client.chat.completions.create(model=MODEL, messages=[TURN], temperature=0, stream=True) as stream:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
second = client.chat.completions.create(model=MODEL, messages=CONVERSATION, temperature=0)
assert second.choices[0].message.content == SECOND_ANSWER
assert second.usage.prompt_tokens_details.cached_tokens >= rows, "the picture's tokens were cached"

parts = [{"type": "input_image", "image_url": DATA_URL}, {"type": "input_text", "text": QUESTION}]
response = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], temperature=0)
assert response.output_text == ANSWER
following = client.responses.create(model=MODEL, input=SECOND_QUESTION, previous_response_id=response.id, temperature=0)
assert following.output_text == SECOND_ANSWER

broken = {"type": "image_url", "image_url": {"url": DATA_URL[:100]}}
try:
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [broken]}])
except openai.BadRequestError as error:
    assert "image" in error.message, error
else:
    raise AssertionError("half a picture was accepted")
print(f"chats, a stream, a second turn, responses, previous_response_id, an error; a picture of {rows} tokens")
