"""Modules whose calls are replayed from CUDA graphs."""
