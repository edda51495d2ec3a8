"""Steps of a model on a CPU that run from recordings of their calls."""
