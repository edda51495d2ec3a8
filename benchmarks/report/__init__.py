"""Statistics, plots and the description of the machine that every benchmark prints."""
