"""Model architectures: what a checkpoint computes. How attention is computed is no part of them."""
