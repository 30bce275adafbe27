"""Translations between pagedkv and other people's interfaces."""
