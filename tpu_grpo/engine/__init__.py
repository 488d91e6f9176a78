"""Rollouts by in-process sglang-jax engines; this is the only package that imports sgl_jax.

It has three entry points: the generator (`Engine`, engine.py), the router over all engines of a run (`Replicas`,
replicas.py), and the stage that turns a PromptBatch into a Rollout (`Sampler`, sampler.py). ``Programs.launch`` in
launches.py launches decode steps; engine.py lists the layers above and below it. All changes to sglang-jax are in
repairs.py.
"""
