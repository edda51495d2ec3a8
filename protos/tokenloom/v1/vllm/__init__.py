"""Generated stubs of the contract of vLLM's engines."""
