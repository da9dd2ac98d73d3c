"""Callbacks for the training loops of other packages, each in a module that imports its package."""
