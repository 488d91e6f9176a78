"""Tunix's own GRPO loop with this package's engine and loss; see examples/tunix_loop.py.

adapter.py     an engine as Tunix's rollout worker
learner.py     Tunix's GRPO learner, taking the engine's log-probabilities as the old policy
cluster.py     Tunix's cluster and trainer, with what is changed in google-tunix 0.1.7, each with its reason
"""
