"""An assistant's turn, parsed as it grows: text, reasoning and tool calls."""
