"""The sides of dispatch.py: each a process that takes turns with the other."""
