"""Processes that run users' code, for rewards and environments, and the sandbox for programs that a model writes.

The main process has a supervisor, which starts a fork server for each reward or environment; the server forks workers.
"""
