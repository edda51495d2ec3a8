"""Anthropic's Messages API, over the same requests as OpenAI's chats."""
