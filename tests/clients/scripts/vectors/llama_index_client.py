"""llama-index: OpenAIEmbedding and OpenAILikeEmbedding of texts and of queries."""

import os

from answers import QUESTIONS, TEXTS, nearest
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

SERVER = {"api_base": os.environ["TOKENLOOM_URL"] + "/v1", "api_key": "none", "max_retries": 0}

for embedding in (
    OpenAIEmbedding(model_name=os.environ["TOKENLOOM_MODEL"], **SERVER),
    OpenAILikeEmbedding(model_name=os.environ["TOKENLOOM_MODEL"], **SERVER),
):
    documents = embedding.get_text_embedding_batch(TEXTS)
    found = [nearest(embedding.get_query_embedding(question), documents) for question in QUESTIONS]
    assert found == [0, 1, 2, 3], (type(embedding).__name__, found)
print(f"both classes: {len(documents)} documents, vectors of {len(documents[0])}, each nearest to its question")
