"""Rollouts by in-process sglang-jax engines; this is the only room that imports sgl_jax.

sampler.py           turns a batch of prompts into a Rollout: requests with keys, completions, texts
broken.py            completions whose log-probabilities are not finite
replicas.py          holds all engines of the run: it has requests served by them and installs weights in them
serving.py           a batch of requests on all replicas: dealt, advanced from one agreed point to the next, dealt again
dealing.py           which replica serves which group, and in which order
engine.py            one engine: build it, install weights, generate, release
options.py           the sizes and settings of an engine;  server_args.py: what sglang-jax is told of them
generation.py        a batch of requests while an engine serves it;  streaming.py: told of after every launch
advancing.py         several engines of one process, none of which waits for another
conversing.py        what the engine asks whoever holds the environments of conversations
waves.py             rows that are out while their environments work, and when they come back
scheduler.py         sglang-jax's scheduler, stepped on the calling thread; quiet_scheduler.py: without its server
decode_loop.py       several decode steps in one launch;  reservation.py: their cache slots
decisions.py         what an engine decided and sampled, as a digest
runner.py            one compiled program per shape, of model, attention and token sampling
step_inputs.py       pads a scheduled batch to the arrays of one step
shapes.py            chooses the few padded shapes that a run compiles
sampling.py          draws tokens from logits
vocabulary.py        shards embedding and output head, and the logits for token sampling
attention.py         the attention modes: gather, flash and native
gather_attention.py  paged attention for any device
kv_formats.py        numbers of the cache, in the model's type or in 8 bits
flash_attention.py   the library's kernel for TPUs
flash_blocks.py      the sizes of that kernel's blocks on each generation of TPUs
native_attention.py  the library's reference
experts.py           mixture-of-experts layers
routed_experts.py    which experts served which token, for the trainer to replay
exchange.py          brings the completions of all replicas to all hosts;  packing.py: as arrays
repairs.py           everything that is changed in sglang-jax 0.1.0rc0, each with its reason
"""
