"""The layers that models are made of: linear, norm, rotary, embedding, activation."""
