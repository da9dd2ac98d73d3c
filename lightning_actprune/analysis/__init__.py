"""Measure or simulate real training steps: what retains an input, how much is kept, and what compression costs."""
