"""Models of Hugging Face transformers: as a model adapter for paged backends, and as the contiguous backend."""
