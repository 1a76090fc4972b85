"""Parts of bench/vs_trl.py: the cases, the two sides, and the turns that they take."""
