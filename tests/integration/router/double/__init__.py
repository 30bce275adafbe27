"""The router of text-generation-inference, as far as a model server can tell, written from what the real one does."""
