"""`pagedkv plan`: how many conversations fit, from a configuration alone, by the engine's own arithmetic."""
