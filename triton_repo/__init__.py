"""Serving with Triton: the repository generator, the Python model, the launcher and a client."""
