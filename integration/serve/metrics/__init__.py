"""Metrics for Prometheus: the catalogue, the collector, and the HTTP endpoint."""
