"""A data-parallel group: how its ranks find each other, agree on waves, grow and shrink."""
