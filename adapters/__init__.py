"""Adapters between pagedkv and interfaces of other projects."""
