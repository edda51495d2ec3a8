"""Plans how many engines of each role a load needs."""
