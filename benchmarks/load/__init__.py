"""Load for a server: prompts, arrivals, the HTTP client and the events that it records."""
