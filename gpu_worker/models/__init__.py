"""Model architectures: what a checkpoint computes. They do not know how attention is computed."""
