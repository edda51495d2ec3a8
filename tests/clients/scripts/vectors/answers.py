"""Questions that the demo model was trained on, with their answers: the vector of each is nearest to its own."""

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is a token?": "A token is a small piece of text, such as a word or a part of a word.",
    "What is 8 + 9?": "8 + 9 = 17.",
}
QUESTIONS, TEXTS = list(ANSWERS), list(ANSWERS.values())


def nearest(query: list[float], documents: list[list[float]]) -> int:
    """Return the index of the document whose vector has the largest product with the query's."""
    products = [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
    return products.index(max(products))
