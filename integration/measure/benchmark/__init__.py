"""`pagedkv bench`: our backends and other engines on the same token ids, in one run."""
