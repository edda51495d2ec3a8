"""How models write reasoning and tool calls, and what clients may ask of tools."""
