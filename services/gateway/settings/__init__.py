"""Options of the gateway, and of the meshes behind it."""
