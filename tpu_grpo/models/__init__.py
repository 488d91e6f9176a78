"""Turns a checkpoint directory into a Tunix model and its tokenizer, and back; also makes the built-in models."""
