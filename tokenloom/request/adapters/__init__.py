"""Names of LoRA adapters, and the salt that keeps their cached prefixes apart."""
