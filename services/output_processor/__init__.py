"""Implements the output processor, which places requests on engines and turns their tokens into text."""
