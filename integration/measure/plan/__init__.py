"""`pagedkv plan`: computes from a configuration how many requests fit, with the engine's own code."""
