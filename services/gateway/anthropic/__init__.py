"""Anthropic's Messages API, over the same jobs as OpenAI's chats."""
