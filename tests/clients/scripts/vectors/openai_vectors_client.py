"""openai: embeddings of one text, several and token ids, as floats and as base64, and errors."""

import math
import os

import openai

client = openai.OpenAI(base_url=os.environ["SCRIPTED_URL"] + "/v1", api_key="none", max_retries=0)
model = os.environ["SCRIPTED_MODEL"]
TEXTS = ["a cat sat on a mat", "the cat sat on the mat", "zzz"]

whole = client.embeddings.create(model=model, input=TEXTS)  # the package asks for base64
assert [item.index for item in whole.data] == [0, 1, 2]
assert whole.usage.total_tokens == sum(len(text) for text in TEXTS)
floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
for one, other in zip(whole.data, floats.data, strict=True):
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one.embedding, other.embedding, strict=True))
alike, unlike = (sum(map(lambda a, b: a * b, whole.data[0].embedding, whole.data[k].embedding)) for k in (1, 2))
assert alike > 0.8 > unlike

short = client.embeddings.create(model=model, input=[list(b"abc")], dimensions=8)
assert len(short.data[0].embedding) == 8

try:
    client.embeddings.create(model=model, input=[])
except openai.BadRequestError as error:
    assert error.param == "input", error
else:
    raise AssertionError("an empty input was accepted")
print(f"{len(whole.data)} vectors of {len(whole.data[0].embedding)}")
