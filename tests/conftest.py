"""Four virtual CPU devices that compute as the command's do, set before anything uses jax, so that meshes are real."""

import os

from tpu_grpo.hosts import start

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
start(None, 1, 0)
