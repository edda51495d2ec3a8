"""llama-index: OpenAIEmbedding and OpenAILikeEmbedding of texts and of a query."""

import os

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

embedding = OpenAILikeEmbedding(
    model_name=os.environ["SCRIPTED_MODEL"],
    api_base=os.environ["SCRIPTED_URL"] + "/v1",
    api_key="none",
    max_retries=0,
)
documents = embedding.get_text_embedding_batch(["a cat sat on a mat", "zzz"])
query = embedding.get_query_embedding("the cat on the mat")
near, far = (sum(a * b for a, b in zip(query, document, strict=True)) for document in documents)
assert near > far, (near, far)
print(f"{len(documents)} documents, vectors of {len(query)}")
