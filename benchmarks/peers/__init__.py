"""Runs other engines on the same prompts. All but `compare` runs in their environments and imports no other code of
ours."""
