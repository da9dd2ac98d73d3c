"""The accuracy study's parts: data on one device, settings of the pruning, the captured training step, the tasks."""
