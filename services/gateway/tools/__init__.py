"""Tool calls: what clients offer, and how models write them."""
