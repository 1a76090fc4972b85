"""Parts of bench/reshard.py."""
