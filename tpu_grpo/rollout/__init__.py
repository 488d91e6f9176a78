"""Rollouts by in-process sglang-jax engines: the only room that imports sgl_jax.

replicas.py          what the pipeline sees: all engines of the run, dealt requests, installed weights
engine.py            one engine: build, generate, install weights, forget prefixes
generation.py        requests on their way through an engine
packing.py           completions as arrays, to pass between hosts
shapes.py            the few padded shapes a run compiles
scheduler.py         sglang-jax's scheduler, stepped on the calling thread
runner.py            one compiled program per shape: model, attention, sampler
sampling.py          our sampler
vocabulary.py        embedding and output head split over devices, and what that asks of the sampler
gather_attention.py  paged attention for any device
flash_attention.py   the library's kernel for heads of any width
experts.py           layers of experts
repairs.py           everything changed in sglang-jax 0.0.2, each with its reason
"""
