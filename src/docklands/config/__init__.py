"""Configuration: schema (pydantic), loading with value sources, no torch."""
