"""The offline API: ``LLM``, an engine core in the caller's process."""
