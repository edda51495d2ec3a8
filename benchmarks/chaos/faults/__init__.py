"""Makes faults and checks that they took effect."""
