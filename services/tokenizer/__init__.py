"""Implements the tokenizer, which renders chats, and turns text into token ids and back."""
