"""Connects the gateway to tokenizers, output processors and the coordinator."""
