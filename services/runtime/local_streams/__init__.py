"""Streams between parts of one host, over unix sockets of their own beside gRPC's: what gRPC's threads cost is saved.

Messages, servicers and statuses are gRPC's. ``docs/decisions.md`` says why, and what stays gRPC.
"""
