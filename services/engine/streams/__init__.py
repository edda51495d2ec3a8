"""The ``Engine`` service: one stream per peer, with its attempts and its frames."""
