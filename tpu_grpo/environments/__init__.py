"""Environments: what the policy has conversations with, of several turns and with tools.

actions.py           what passes between the policy's turns and an environment
dialects/            what a chat template writes around turns, in tokens
"""
