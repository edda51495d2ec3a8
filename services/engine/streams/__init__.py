"""The ``Engine`` service: one stream for each peer, its attempts and its frames."""
