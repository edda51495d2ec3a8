"""openai: embeddings of one text, several and token ids, as floats and as base64, and errors."""

import math
import os

import openai
from answers import QUESTIONS, TEXTS, nearest

client = openai.OpenAI(base_url=os.environ["TOKENLOOM_URL"] + "/v1", api_key="none", max_retries=0)
model = os.environ["TOKENLOOM_MODEL"]

whole = client.embeddings.create(model=model, input=TEXTS)  # the package asks for base64
assert [item.index for item in whole.data] == [0, 1, 2, 3]
alone = [client.embeddings.create(model=model, input=text).usage.total_tokens for text in TEXTS]
assert whole.usage.total_tokens == sum(alone)
floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
for one, other in zip(whole.data, floats.data, strict=True):
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one.embedding, other.embedding, strict=True))
asked = client.embeddings.create(model=model, input=QUESTIONS)
documents = [item.embedding for item in whole.data]
assert [nearest(item.embedding, documents) for item in asked.data] == [0, 1, 2, 3]

short = client.embeddings.create(model=model, input=[[97, 98, 99]], dimensions=64)
assert len(short.data[0].embedding) == 64

try:
    client.embeddings.create(model=model, input=[])
except openai.BadRequestError as error:
    assert error.param == "input", error
else:
    raise AssertionError("an empty input was accepted")
print(f"{len(whole.data)} vectors of {len(whole.data[0].embedding)}")
