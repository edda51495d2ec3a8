"""langchain-openai: OpenAIEmbeddings of documents and of a query."""

import os

from langchain_openai import OpenAIEmbeddings

# Tokens are counted by the server: the package would count them with OpenAI's tokenizer.
embeddings = OpenAIEmbeddings(
    base_url=os.environ["SCRIPTED_URL"] + "/v1",
    api_key="none",
    model=os.environ["SCRIPTED_MODEL"],
    check_embedding_ctx_length=False,
    max_retries=0,
)
documents = embeddings.embed_documents(["a cat sat on a mat", "zzz"])
query = embeddings.embed_query("the cat on the mat")
near, far = (sum(a * b for a, b in zip(query, document, strict=True)) for document in documents)
assert near > far, (near, far)
print(f"{len(documents)} documents, vectors of {len(query)}")
