"""Names LoRA adapters in requests, and loads them on all engines of a mesh."""
