"""Parses an assistant's turn as it grows: text, reasoning and tool calls."""
