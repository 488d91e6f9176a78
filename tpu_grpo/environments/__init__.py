"""Environments, with which the policy has conversations of several turns, through tool calls or texts.

`EnvironmentPool` (pool.py) runs the environments of one host, and `Conversation` (conversation.py) keeps the tokens of
one conversation. Users' classes run in processes of ``workers/``, where ``playing.py`` calls them.
"""
