"""Model architectures: what a checkpoint computes, without knowing how attention is done."""
