"""Worker of the SMG gateway: the service `vllm.grpc.engine.VllmEngine` over the serving loop."""
