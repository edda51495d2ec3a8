"""OpenAI's Responses API, over the same requests as chats."""
