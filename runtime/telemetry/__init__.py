"""Telemetry of the coordinator: counts, recent rounds and spans, traces."""
