"""The gateway's links to the mesh: tokenizers, output processors, coordinator and engine administration."""
