"""td_serve: a Ray Serve deployment on vLLM that serves rounds of many agents."""
