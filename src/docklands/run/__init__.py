"""Floor 7: wiring and THE loop. Read loop.py first."""
