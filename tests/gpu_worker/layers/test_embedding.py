"""Embeddings of tokens, rows that replace them, and the levels of rows that are added after layers."""

import torch

from tokenloom.gpu_worker.layers.embedding import add_level, embed


def test_rows_replace_embeddings_after_their_scale() -> None:
    table = torch.arange(6, dtype=torch.float32).view(3, 2)
    rows = torch.full((2, 4), 7.0)  # of two levels
    found = embed(table, torch.tensor([1, 0, 0, 2]), [(1, rows)], scale=10.0)
    assert found.tolist() == [[20.0, 30.0], [7.0, 7.0], [7.0, 7.0], [40.0, 50.0]]


def test_a_level_is_added_to_the_tokens_whose_rows_have_it() -> None:
    """A client's rows beside those of an image have one level."""
    deep = torch.arange(12, dtype=torch.float32).view(2, 6)
    embeds = [(0, torch.ones(1, 2)), (2, deep)]
    hidden = torch.zeros(4, 2)
    add_level(hidden, embeds, 1)
    assert hidden.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 3.0], [8.0, 9.0]]
    add_level(hidden, embeds, 2)
    assert hidden.tolist() == [[0.0, 0.0], [0.0, 0.0], [6.0, 8.0], [18.0, 20.0]]
    add_level(hidden, embeds, 3)
    assert hidden[2:].tolist() == [[6.0, 8.0], [18.0, 20.0]]
