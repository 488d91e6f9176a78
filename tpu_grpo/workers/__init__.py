"""Processes that run users' code, for rewards and environments, and the sandbox for models' programs.

The main process has a supervisor, which starts a fork server for each reward or environment; the server forks workers.
"""
