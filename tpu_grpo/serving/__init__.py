"""A model served without a run: `ServedPolicy` answers prompts in its own engine, `Server` HTTP requests with it."""
