"""Runnable examples: training scripts, YAML configurations, models and benchmarks."""
