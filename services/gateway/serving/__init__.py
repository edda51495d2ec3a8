"""The meshes behind the gateway, and whether each would answer a request now."""
