"""LoRA adapters: low-rank changes to a model's layers, of which each request of a step may name another."""
