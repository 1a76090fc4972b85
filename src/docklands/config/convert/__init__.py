"""Configurations of other systems as ours: the mechanism (base), a table for each system, and their pages."""
