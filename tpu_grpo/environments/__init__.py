"""Environments: the policy has conversations of several turns with them, through tools or texts.

`EnvironmentPool` (pool.py) has the environments of one host, and `Conversation` (conversation.py) is one as tokens.
Users' classes run in processes of ``workers/``, which ``playing.py`` drives there.
"""
