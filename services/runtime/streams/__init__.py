"""Both ends of the long-lived streams that carry many requests, each in a slot: hello, credit, heartbeats, liveness."""
