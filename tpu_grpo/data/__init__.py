"""Reads records, renders them into prompts, and chooses the prompts of each step."""
