"""GRPO on TPU pod slices: Tunix learns, in-process sglang-jax engines sample, one program runs on every host.

    import tpu_grpo

    config = tpu_grpo.load_config("configs/demo_cpu.yaml", ["run.max_steps=5"])
    summary = tpu_grpo.train(config)

Every name is imported when it is first used. So ``import tpu_grpo`` costs nothing, and jax's platform can be chosen
before jax is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
