"""What a model keeps for backward, found out in real steps: what else retains it, how much it is, and what it costs."""
