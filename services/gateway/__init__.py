"""The public edge: OpenAI's HTTP API and gRPC in, one request's road through the mesh, text out."""
