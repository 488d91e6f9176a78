"""Four virtual CPU devices, set before anything imports jax, so that meshes are real in every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
