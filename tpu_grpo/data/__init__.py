"""Prompts: read as records, rendered, and drawn from an endless stream of batches whose position is the step."""
