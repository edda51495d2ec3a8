"""A thin form of Ollama's API, over the same requests as OpenAI's chats, for clients that speak only that."""
