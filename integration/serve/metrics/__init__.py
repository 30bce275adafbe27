"""Metrics for Prometheus: what is counted, and the endpoint that serves it."""
