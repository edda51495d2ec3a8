"""Steps of a model that were recorded as lists of kernel calls, and run without Python."""
