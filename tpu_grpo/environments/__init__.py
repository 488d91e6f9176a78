"""Environments for conversations of several turns, in which the policy calls tools or sends texts.

`EnvironmentPool` (pool.py) runs the environments of one host, and `Conversation` (conversation.py) keeps the tokens of
one conversation. Users' environment classes run in worker processes (``workers/``), where ``playing.py`` calls them.
"""
