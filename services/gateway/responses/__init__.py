"""OpenAI's Responses API, over the same jobs as chats."""
