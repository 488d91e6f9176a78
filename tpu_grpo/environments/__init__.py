"""Environments for multi-turn conversations, in which the policy calls tools or sends texts.

`EnvironmentPool` (pool.py) runs the environments of one host, and `Conversation` (conversation.py) keeps the tokens of
one conversation. Users' environments run in worker processes (``tpu_grpo/workers/``), where ``environment_worker.py``
calls them.
"""
