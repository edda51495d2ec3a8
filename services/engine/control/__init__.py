"""What an operator asks of one engine: pause, sleep, new weights, another role, KV events."""
