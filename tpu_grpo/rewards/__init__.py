"""Scores the completions of a rollout: calls the rewards, sums their weighted values, and sends the sums to all hosts.

To write a reward, read tpu_grpo/rewards/protocol.py; the shipped rewards are in tpu_grpo/rewards/shipped/.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
