"""Structured outputs: compiles grammars outside the loop, follows each output through its grammar, and sends the worker
bitmasks of the tokens that may come next. A backend is loaded when the first request needs it."""
