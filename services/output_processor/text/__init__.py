"""Turns token ids into text: incremental decoding, stop strings and the text of log probabilities."""
