"""`generate.v3`, the gRPC interface of text-generation-inference, on top of any `Backend` and `Tokenizer`."""
