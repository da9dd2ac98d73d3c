"""Runnable examples: training scripts, YAML configurations and models."""
