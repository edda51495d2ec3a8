"""What every process of ours may use: it imports nothing of ours, so every part may import it."""
