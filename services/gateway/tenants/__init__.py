"""Which tenant a client belongs to, and what that means for the request."""
