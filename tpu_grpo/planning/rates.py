"""The constants of the estimate of seconds: what shares of a chip's speeds programs reach, and what a host takes.

Published speeds are those of sglang-jax's cookbook (Qwen3-8B and Qwen3-32B on v6e-4, tensor 4, 1,024 to 8,192 tokens
in, 1,024 out, 16 to 256 rows at once) and of its pull request 194. CACHE_BYTES_PER_SECOND and PREFILL are fitted to
these seven points, which come out within 7 %; everything else comes from elsewhere, as said.
tests/planning/test_published.py holds this.
"""

MEMORY = 0.8
"""Of the memory's speed, for weights in a decode step and for the optimizer's state: large matrices, read in order."""
CACHE_BYTES_PER_SECOND = 0.74e12
"""The keys and values that the attention kernel gets through on a chip, where its memory is not slower. Fitted, 45 %
of the memory's speed of v6e. It is not a share, because instructions limit the kernel: those that the compiler makes
of it for v5e keep up with a memory half as fast. A number of 8 bits therefore counts as one of 16. The kernel of the
published speeds was an earlier one, without the form for decode steps that engines have here."""
PREFILL = 0.25
"""Of a chip's products, in a prefill. Fitted; the published times to first tokens alone give 14 to 28 %."""
PRODUCTS = 0.5
"""Of a chip's products, in a learner's program. MaxText publishes 45 % for Llama-3.1-8B on v6e-256, what is computed
again not counted."""
LINKS = 0.8
"""Of the links' speed: 90 of 112 GB/s a link on v6e ("How to scale your model", chapter 2)."""
ALLREDUCE_SECONDS = 2e-6
"""The least time of one all-reduce: two hops of a microsecond each (the same chapter)."""
LAUNCH_SECONDS, ARRAY_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 0.5e-3, 0.75e-6, 6e-6, 2e-6
"""Host time of one launch of an engine: the launch itself, more for each array and each of the engine's devices, the
scheduling of each row, and each token that is taken in. Fitted to launches of one step of this package's engines, 0.97
to 4.3 ms, within 14 %; the last one to launches of 1 to 32 steps for 64 rows, which take 1.4 to 2.3 us a token."""
STEP_INPUTS = 7
"""Arrays that a launch of decode steps gets besides weights and cache: rows, limits, and five for the attention."""
FILL = 0.95
"""Of the tokens of training rows that are packed, those that are not padding."""
SPREAD = 0.9
"""The standard deviation of the logarithm of the lengths of completions. With it, 6 % of completions with a mean of 680
tokens are cut at 2,048."""
