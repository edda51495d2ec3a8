"""Other engines on the same prompts. All but `compare` runs in their environments and imports nothing else of ours."""
