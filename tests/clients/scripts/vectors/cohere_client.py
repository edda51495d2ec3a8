"""cohere: rerank of its APIs v1 and v2, and an error."""

import os

import cohere
from answers import QUESTIONS, TEXTS

SERVER = {"base_url": os.environ["TOKENLOOM_URL"], "api_key": "none"}
MODEL = os.environ["TOKENLOOM_MODEL"]

client = cohere.ClientV2(**SERVER)
for index, question in enumerate(QUESTIONS):
    whole = client.rerank(model=MODEL, query=question, documents=TEXTS)
    assert sorted(result.index for result in whole.results) == [0, 1, 2, 3]
    scores = [result.relevance_score for result in whole.results]
    assert whole.results[0].index == index
    assert scores == sorted(scores, reverse=True)

first = client.rerank(model=MODEL, query=QUESTIONS[2], documents=TEXTS, top_n=1)
assert [result.index for result in first.results] == [2]
old = cohere.Client(**SERVER).rerank(model=MODEL, query=QUESTIONS[2], documents=TEXTS, top_n=2, return_documents=True)
assert next(result.document.text for result in old.results) == TEXTS[2]

try:
    client.rerank(model="no-such-model", query="x", documents=TEXTS)
except cohere.NotFoundError as error:
    assert "no-such-model" in str(error.body), error
else:
    raise AssertionError("an unknown model was accepted")
print(f"{len(QUESTIONS)} queries over {len(TEXTS)} documents by v2, one by v1, an unknown model is refused")
