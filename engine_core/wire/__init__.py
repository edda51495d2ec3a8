"""Data that crosses process boundaries: messages, their encoding, and shared memory for large arrays."""
