"""The public edge: OpenAI's HTTP API and gRPC, from a client's request to its text."""
