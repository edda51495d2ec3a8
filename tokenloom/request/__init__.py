"""What every entrance knows of a request: errors, checks, constraints. No server code."""
