"""What ``python -m lightning_actprune`` runs; ``__main__`` imports a command only when it is called."""
