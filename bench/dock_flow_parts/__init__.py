"""The sides of dock_flow.py: each a process that takes turns with the others."""
