"""Keeps what the coordinator knows of picks: when they are answered, arrive and expire, and where they went."""
