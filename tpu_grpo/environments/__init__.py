"""Environments: the policy has conversations of several turns with them, through tools or texts.

`EnvironmentPool` in pool.py has the environments of one host; `Conversation` in conversation.py is one of them as tokens.
Users' classes run in processes of ``workers/``, which ``playing.py`` drives there.
"""
