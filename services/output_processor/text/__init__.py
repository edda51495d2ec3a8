"""Token ids to text: incremental decoding, stop strings and the text of log probabilities."""
