"""Operations on one engine: pause, sleep, new weights, another role, KV events."""
