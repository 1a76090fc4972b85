"""Observation: metrics, spans, sinks, logs, the run directory, the watchdog. No torch here."""
