"""Defines, types, documents and validates every setting of a run; unknown keys are refused.

    config = load_config("configs/demo_cpu.yaml", ["run.seed=1", "optimizer.learning_rate=3e-4"])

No slow library such as jax is imported, so that ``--help`` and error messages appear quickly.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
