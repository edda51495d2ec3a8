"""langchain-openai: OpenAIEmbeddings of documents and of a query, at once and asynchronously."""

import asyncio
import os

from answers import QUESTIONS, TEXTS, nearest
from langchain_openai import OpenAIEmbeddings

# Tokens are counted by the server: the package would count them with OpenAI's tokenizer.
embeddings = OpenAIEmbeddings(
    base_url=os.environ["TOKENLOOM_URL"] + "/v1",
    api_key="none",
    model=os.environ["TOKENLOOM_MODEL"],
    check_embedding_ctx_length=False,
    max_retries=0,
)
documents = embeddings.embed_documents(TEXTS)
assert [nearest(embeddings.embed_query(question), documents) for question in QUESTIONS] == [0, 1, 2, 3]
later = asyncio.run(embeddings.aembed_documents(TEXTS))
assert [nearest(vector, later) for vector in documents] == [0, 1, 2, 3]
print(f"{len(documents)} documents, vectors of {len(documents[0])}, each nearest to its question")
