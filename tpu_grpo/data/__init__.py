"""Reads records, renders them into prompts, and draws the prompts of each step from an endless stream."""
