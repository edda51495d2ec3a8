"""How parts of a mesh reach each other: addresses, channels, credit, TLS and who may call."""
