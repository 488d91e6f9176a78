"""Holds the built-in tasks, with which the whole loop can be tried without data or a model of one's own."""
