"""Programs for CPUs that are compiled quickly rather than well, for tests that compile more than they compute.

jax's ``jax_disable_most_optimizations`` leaves out what LLVM does. XLA's emitters of fusions remain, which take more
than half of the rest (jaxlib 0.10.2); here they are left out with it.
"""

from typing import Any

EMITTERS = "xla_cpu_use_fusion_emitters"
VARIABLES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "XLA_FLAGS": f"--{EMITTERS}=false"}
"""The variables that make commands compile as tests do in which jax's option is set."""


def install() -> None:
    """Leave out the emitters, too, wherever jax's option is set when a program is compiled."""
    import jax  # commands that import this file fork before jax is there
    from jax._src import compiler

    original = compiler.get_compile_options

    def options(*args: Any, backend: Any = None, **more: Any) -> Any:
        found = original(*args, backend=backend, **more)
        if jax.config.read("jax_disable_most_optimizations") and getattr(backend, "platform", "") == "cpu":
            found.env_option_overrides = [*found.env_option_overrides, (EMITTERS, False)]
        return found

    setattr(compiler, "get_compile_options", options)  # noqa: B010  # it is no attribute of ours
