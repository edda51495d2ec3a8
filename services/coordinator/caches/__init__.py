"""Follows what happens in the engines' prefix caches, so that evicted blocks attract no more prompts."""
