"""Prompts: tokenizers, sources of rows, built-in tasks, and the stream that hands prompts out."""
