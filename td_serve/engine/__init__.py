"""What touches vLLM: everything else speaks td_serve.types."""
