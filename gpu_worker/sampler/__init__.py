"""Turns the logits of a step into tokens and log probabilities, on the host or on the device."""
