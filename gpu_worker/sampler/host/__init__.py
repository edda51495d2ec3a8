"""Changes logits and samples from them on the host: processors change the logits, then one rule chooses."""
