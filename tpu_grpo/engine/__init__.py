"""Rollouts by in-process sglang-jax engines; this is the only room that imports sgl_jax.

Three parts have doors: the generator (`Engine`, engine.py), the router over all engines of a run (`Replicas`,
replicas.py), and the stage that turns a PromptBatch into a Rollout (`Sampler`, sampler.py). A decode step is launched
by ``Programs.launch`` in launches.py; engine.py lists the floors above and below it. Everything that is changed in
sglang-jax is in repairs.py.
"""
