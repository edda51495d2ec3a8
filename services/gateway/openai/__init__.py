"""OpenAI's HTTP API: request bodies, and the shapes of answers."""
