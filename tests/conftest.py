"""What all tests share, set before anything uses jax: four virtual CPU devices that compute as the command's do, so
that meshes are real, and a cache of programs, because many tests build the same model, engine and learner again."""

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# --hypothesis-profile=default draws other examples every time; no test fails because the machine is slow
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # not in a worker, nor in a process that a test starts
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="tpu_grpo_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import shapes  # noqa: E402

shapes.install()  # before the package is imported

from tpu_grpo.hosts import start  # noqa: E402

start(None, 1, 0)
