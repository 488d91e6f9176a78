"""Rows of `tpu-grpo check` about numbers: they compare the config's model (real widths, few layers, random weights) on
these devices with float64 NumPy.

Array suffixes: P prompts, G completions per prompt, B = P*G rows, R requests of a check, T tokens, V vocabulary. For
attention also: L positions, H query heads, K key-value heads, D head width.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt32

from tpu_grpo.checking.findings import Finding, within
from tpu_grpo.config import ModelSection, RunConfig, parse_config
from tpu_grpo.engine.attention_probe import attend, head_counts
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampling import SamplingColumns, filter_logits, sample_tokens
from tpu_grpo.hosts import Hosts
from tpu_grpo.hosts.caching import cache_directory, exclusive
from tpu_grpo.launching.tpus import Generation
from tpu_grpo.learner import Learner
from tpu_grpo.models.checkpoint import Checkpoint, read_checkpoint
from tpu_grpo.models.fetching import fetched
from tpu_grpo.models.hf_directory import copy_tokenizer, new_directory, save_tensors
from tpu_grpo.models.reference import read_weights, reference_logprobs
from tpu_grpo.models.tasks import TASKS
from tpu_grpo.models.tokenizers import builtin_tokenizer
from tpu_grpo.planning.slice_plan import known_model, with_layers
from tpu_grpo.records.stages import (
    Completion,
    Prompt,
    PromptBatch,
    Request,
    Rollout,
    SampleKey,
    SamplingParams,
    ScoredRollout,
    Scores,
)
from tpu_grpo.run.abstract import open_abstract_checkpoint
from tpu_grpo.run.engines import SyncedEngines, probe_bound
from tpu_grpo.run.inputs import check_model
from tpu_grpo.run.meshes import Meshes, build_meshes
from tpu_grpo.run.parts import open_engines
from tpu_grpo.run.policies import load_inputs
from tpu_grpo.weights.plan import QUANTIZED, SCALE, named_leaves

LAYERS = 2
PROMPT_TOKENS, NEW_TOKENS = 40, 12
"""The most tokens of a prompt, and of a completion, that NumPy computes."""
FEW_ROWS = 8
INFORMATIVE = 2
"""The number of groups whose rewards differ; rows of all other groups have the advantage 0."""
EXACT = {"cpu": 3e-4, "tpu": 1e-2}
"""The largest allowed difference of a log-probability in float32. Measured on CPUs: 1e-6 to 8e-5. TPUs were not
measured; TPUs compute float32 products in several bfloat16 passes."""
ATTENTION = {"float32": 2e-5, "bfloat16": 2e-2}
"""The largest allowed difference of attention's outputs, which are about 1. On CPUs 1e-6 and 4e-3 were measured."""
GRADIENT = {"cpu": 2e-3, "tpu": 5e-2}
"""The largest allowed relative difference of the loss's derivative along the gradient. Measured on CPUs: below 1e-4."""
REPORT = "paste this block into an issue"


@dataclass
class Shared:
    """The object that all rows of a process share. Engines and learners are built at their first use."""

    config: RunConfig
    directory: Path
    """Where the check writes."""
    join: Callable[[], Hosts]
    """Connects to the other hosts, and returns them."""
    hosts: Hosts = field(default_factory=Hosts)
    generation: Generation | None = None
    rates: dict[str, float] = field(default_factory=dict)
    """The measured rates, by their names in `Rates`, and the measured speeds of a device."""
    builds: dict[str, "Build"] = field(default_factory=dict)

    @cached_property
    def known(self) -> RunConfig:
        """The run's config. If the model is not on this machine, model.path is the shipped directory of the model."""
        return self.config.model_copy(update={"model": known_model(self.config.model)})

    def build(self, dtype: str) -> "Build":
        """Return the engines and the learner for a model of few layers in ``dtype``; the first call builds them."""
        if dtype not in self.builds:
            with open_abstract_checkpoint(self.known.model) as whole:
                check_model(self.known, whole)
                path = small_model(self.known.model, whole, tokenizer_directory(self.config.model))
                tensor = build_meshes(
                    self.known.meshes, self.known.model, self.known.environment, self.known.row_tokens, whole
                ).tensor
            self.builds[dtype] = Build.make(self._checked_config(path, dtype, tensor), self.hosts)
        return self.builds[dtype]

    def _checked_config(self, path: Path, dtype: str, tensor: int) -> RunConfig:
        """Return the run's config with the small model, plain GRPO, all parameters trained, built-in data and reward.

        If ``dtype`` is the run's model.dtype, engines have the run's sizes, otherwise few rows, to compile less.
        """
        config, keep = self.known, ("group_size", "micro_batch_prompts", "row_tokens")
        filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        model = {"path": str(path), "dtype": dtype, "attention": config.model.attention, "remat": config.model.remat}
        sizes = {"prompts_per_step": config.data.prompts_per_step, "max_prompt_tokens": config.data.max_prompt_tokens}
        few = {"max_running_requests": FEW_ROWS, "batch_paddings": None, "prefill_tokens": 64, "kv_tokens": None}
        rollout = config.rollout.model_dump() | filters | (few if dtype != config.model.dtype else {})
        meshes = config.meshes.model_dump()
        meshes["sampler"]["tensor"] = tensor
        return parse_config(
            {
                "run": {"name": config.run.name, "dir": str(cache_directory() / "check" / "no_run")},
                "model": model,
                "data": {"path": "builtin:addition", **sizes},
                "rollout": rollout,
                "rewards": [{"name": "exact_answer"}],
                "algorithm": {name: getattr(config.algorithm, name) for name in keep}
                | {"group_size": max(2, config.algorithm.group_size)},  # plain GRPO needs a baseline
                "optimizer": {"learning_rate": 1e-3},
                "meshes": meshes,
                "checkpoint": {"resume": "never"},
            }
        )


# --- the model -------------------------------------------------------------------------------------------------------


def tokenizer_directory(model: ModelSection) -> Path | None:
    """Return the directory of ``model.path``; None for a built-in model or one that was not fetched yet."""
    if model.builtin is not None:
        return None
    return Path(model.path).expanduser() if model.hub is None else fetched(model.hub)


def small_model(section: ModelSection, whole: Checkpoint, tokenizer: Path | None) -> Path:
    """Write a random model of LAYERS layers with the family and widths of ``whole``, and its tokenizer if there is one.

    Matrices are normal with a standard deviation of width^-1/2. Embedding and head have three times that, so that
    logits have a standard deviation of 3. All weights are exact in bfloat16, so that both dtypes have the same weights.
    """
    with with_layers(whole, min(LAYERS, whole.config.num_hidden_layers)) as few:
        text = json.dumps([section.path, str(tokenizer), few.hf_config], sort_keys=True)
        path = cache_directory() / "check" / hashlib.sha256(text.encode()).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_suffix(".lock")):
            if not path.exists():
                with new_directory(path) as directory:
                    _write_random(directory, few)
                    _write_tokenizer(directory, section, tokenizer)
    return path


def _write_random(directory: Path, few: Checkpoint) -> None:
    family, width, rng = few.family, few.config.hidden_size, np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in few.shapes.items():
        if len(shape) == 1:
            norms = rng.uniform(0.7, 1.3, shape) - family.model_type.startswith("gemma")  # Gemma adds 1 itself
            value = norms if name.endswith("norm.weight") else 0.02 * rng.standard_normal(shape)
        else:
            scale = shape[-1] ** -0.5 if ".layers." in name else 3 * width**-0.5
            value = scale * rng.standard_normal(shape, np.float32)
        tensors[name] = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    save_tensors(directory / "model.safetensors", _fused(few, tensors))
    (directory / "config.json").write_text(json.dumps({**few.hf_config, "torch_dtype": "float32"}))


def _fused(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Concatenate, in place, tensors that the family's checkpoints store as one tensor."""
    family = checkpoint.family
    for name, parts in (family.fused_tensors(checkpoint.config) if family.is_fused else {}).items():
        tensors[name] = np.concatenate([tensors.pop(part) for part in parts])
    return tensors


def _write_tokenizer(directory: Path, model: ModelSection, source: Path | None) -> None:
    if model.builtin is not None:
        builtin_tokenizer(TASKS[model.builtin]).save_pretrained(directory, save_jinja_files=False)
    elif source is not None:
        copy_tokenizer(source, directory)


@dataclass
class Build:
    """A run's engines and learner with a small model."""

    config: RunConfig
    checkpoint: Checkpoint
    meshes: Meshes
    hosts: Hosts
    learner: Learner
    engines: SyncedEngines
    sampled: tuple[list[Request], list[Completion]] | None = None

    @classmethod
    def make(cls, config: RunConfig, hosts: Hosts) -> "Build":
        """Build engines and learner for a small model, and move the weights into the engines."""
        checkpoint = read_checkpoint(Path(config.model.path))
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
        learner = Learner(config, load_inputs(config.model, config.run.seed, checkpoint, meshes), hosts)
        options = EngineOptions.from_config(config, (), replicas=meshes.replicas, platform=meshes.platform)
        engines = open_engines(options, hosts, checkpoint, meshes, config.meshes, config.model.lora)
        engines.install(learner.params())
        assert engines.sync is not None
        learner.share(engines.sync.shared_leaves)
        return cls(config, checkpoint, meshes, hosts, learner, engines)

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return "tpu" if self.meshes.platform == "tpu" else "cpu"

    def exact(self) -> AbstractContextManager[Any]:
        """Return a context in which TPUs compute float32 products with the highest precision."""
        precise = self.platform == "tpu" and self.config.model.dtype == "float32"
        return jax.default_matmul_precision("highest") if precise else nullcontext()

    @property
    def engine(self) -> Any:
        """The first engine of this host."""
        return next(iter(self.engines.replicas.engines.values()))

    @property
    def longest_prompt(self) -> int:
        """The tokens of the longest prompt that NumPy computes."""
        return min(self.config.data.max_prompt_tokens, PROMPT_TOKENS)

    def sample(self) -> tuple[list[Request], list[Completion]]:
        """Return requests and completions of four prompts, greedy and at temperature 1; the first call samples them."""
        if self.sampled is None:
            new, rng = min(self.config.rollout.max_new_tokens, NEW_TOKENS), np.random.default_rng(1)
            lengths = [max(1, self.longest_prompt * part // 4) for part in (1, 2, 3, 4)]
            prompts = [tuple(rng.integers(0, self.checkpoint.config.vocab_size, n).tolist()) for n in lengths]
            asked = [
                Request(ids, SamplingParams(new, temperature, ignore_stop=True), SampleKey(0, 0, row, 0))
                for temperature in (0.0, 1.0)
                for row, ids in enumerate(prompts)
            ]
            self.sampled = asked, self.engines.replicas.generate(asked)
        return self.sampled

    def reference(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], weights: Any = None
    ) -> list[Float[np.ndarray, "T V"]]:
        """Compute in float64 the log-probabilities of the whole vocabulary at every sampled token of these rows."""
        ids = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
        tokens_BT = np.zeros((len(ids), max(map(len, ids))), np.int64)
        for row, line in zip(tokens_BT, ids, strict=True):
            row[: len(line)] = line
        full_BTV = reference_logprobs(self.checkpoint.directory, tokens_BT, changed=weights)
        return [
            full[len(prompt) - 1 : len(line) - 1] for full, prompt, line in zip(full_BTV, prompts, ids, strict=True)
        ]


# --- the rows --------------------------------------------------------------------------------------------------------


def compile_programs(shared: Shared) -> Finding:
    """Compile the programs of engines and weight sync for a model of few layers."""
    build = shared.build("float32")
    with build.exact():
        count = build.engines.replicas.compile_all()
    return Finding("works", f"{count} programs of engines, and the weight sync, were compiled")


def attention(shared: Shared) -> Finding:
    """Compare the engine's attention, in a prefill and in a decode step, with a softmax in float64."""
    finding = Finding("works", "")
    for dtype in ("float32", "bfloat16"):
        build = shared.build(dtype)
        gap = max(float(np.abs(found - exact).max()) for found, exact in _attended(build))
        name = f"{build.engine.options.attention} attention in {dtype}"
        finding = within(gap, ATTENTION[dtype], name, f"try rollout.attention=gather, and {REPORT}")
        if finding.verdict != "works":
            break
    return finding


def _attended(build: Build) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute attention by the engine and in float64; returns both outputs of a prefill, and both of a decode step."""
    heads, kv_heads, width = head_counts(build.engine)
    lengths_B = np.array([2, 7, PROMPT_TOKENS, PROMPT_TOKENS - 3])
    rng, dtype = np.random.default_rng(2), ml_dtypes.bfloat16
    shape = (len(lengths_B), PROMPT_TOKENS)
    q, k, v = (
        rng.standard_normal((*shape, n, width)).astype(dtype).astype(np.float32) for n in (heads, kv_heads, kv_heads)
    )
    with build.exact():
        found = attend(build.engine, q, k, v, lengths_B)
    seen = np.tril(np.ones((PROMPT_TOKENS, PROMPT_TOKENS), bool))
    k, v = (np.repeat(x, heads // kv_heads, axis=2).astype(np.float64) for x in (k, v))
    scores = np.where(seen, np.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(width), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhlm,bmhd->blhd", weights / weights.sum(-1, keepdims=True), v)
    before = np.concatenate([row[: length - 1] for row, length in zip(exact, lengths_B, strict=True)])
    last = exact[np.arange(len(exact)), lengths_B - 1]
    return [(found.prefill_THD, before), (found.decode_BHD, last)]


def filters(shared: Shared) -> Finding:
    """Compare the tokens that top-k, top-p and min-p keep with those that a sort in float64 keeps."""
    logits_BV, columns = _logits(shared)
    kept_BV = np.asarray(jax.jit(filter_logits)(logits_BV, columns)) > -np.inf
    for row, logits in enumerate(logits_BV):
        exact, near = _kept(logits, columns, row)
        if len(wrong := np.flatnonzero((kept_BV[row] != exact) & ~near)):
            setting = {name: float(getattr(columns, name)[row]) for name in ("top_k", "top_p", "min_p")}
            what = "dropped" if exact[wrong[0]] else "kept"
            text = f"with {setting}, {len(wrong)} tokens of {len(logits)} were wrongly {what}, such as {wrong[0]}"
            return Finding("broken", text, f"sample without filters, and {REPORT}")
    return Finding("works", f"top-k, top-p and min-p keep what a sort of {kept_BV.shape[1]} logits does")


def _logits(shared: Shared) -> tuple[Float[np.ndarray, "B V"], SamplingColumns]:
    """Return eight rows of random logits over the vocabulary, and their sampling settings and keys."""
    with open_abstract_checkpoint(shared.known.model) as whole:
        vocabulary = whole.config.vocab_size
    rows, rng = 8, np.random.default_rng(3)
    columns = SamplingColumns(
        temperature=np.ones(rows, np.float32),
        top_k=np.array([0, 5, 0, 0, 50, 1, 0, 7], np.int32),
        top_p=np.array([1, 1, 0.9, 1, 0.8, 1, 0.5, 1], np.float32),
        min_p=np.array([0, 0, 0, 0.05, 0.02, 0, 0, 0.01], np.float32),
        key=rng.integers(0, 2**32, (rows, 4), np.uint32),
        position=rng.integers(1, 2**15, rows).astype(np.int32),
    )
    return (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32), columns


def _kept(logits: np.ndarray, columns: SamplingColumns, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks: tokens that the row's filters keep, and tokens so near a threshold that rounding decides."""
    top_k, top_p, min_p = int(columns.top_k[row]), float(columns.top_p[row]), float(columns.min_p[row])
    values = logits.astype(np.float64)
    order = np.argsort(-values)
    rank, weights = np.argsort(order), np.exp(values - values.max())
    inside = rank < (top_k or len(values))
    before = (np.cumsum((weights * inside)[order]) - (weights * inside)[order])[rank] / (weights * inside).sum()
    exact = inside & ((before < top_p) | (top_p >= 1.0)) & (weights >= min_p)
    return exact, (np.abs(before - top_p) < 1e-5) | (np.abs(weights - min_p) < 1e-6)


def sampler(shared: Shared) -> Finding:
    """Compare sampled tokens and their log-probabilities with those that NumPy computes by Gumbel noise and softmax."""
    logits_BV, columns = _logits(shared)
    drawn = jax.jit(sample_tokens)(logits_BV, columns)
    worst, wrong = 0.0, 0
    for row, line in enumerate(logits_BV):
        logits = line.astype(np.float64)
        exact, _ = _kept(logits, columns, row)
        scores = np.where(exact, logits + _noise(columns.key[row], int(columns.position[row]), len(logits)), -np.inf)
        token = int(drawn.token[row])
        wrong += bool(scores[token] < scores.max() - 1e-3)
        peak = logits.max()
        worst = max(
            worst, abs(float(drawn.logprob[row]) - (logits[token] - peak - np.log(np.exp(logits - peak).sum())))
        )
    if wrong:
        text = f"{wrong} of {len(logits_BV)} drawn tokens are not those of their keys and logits"
        return Finding("broken", text, REPORT)
    return within(worst, 1e-4, f"{len(logits_BV)} tokens are those of their keys; log-probabilities are", REPORT)


def _noise(key: UInt32[np.ndarray, " 4"], position: int, vocabulary: int) -> Float[np.ndarray, " V"]:
    """Compute the Gumbel noise of each token in float64, by Threefry-2x32 (Salmon et al. 2011, figure 2)."""
    zero = np.zeros(1, np.uint32)
    words = (zero, np.array([key[0]], np.uint32))
    for part in (*key[1:], position):
        words = _threefry(words, zero, np.array([part], np.uint32))
    tokens = np.arange(vocabulary, dtype=np.uint32)
    coarse, fine = _threefry(words, np.zeros_like(tokens), tokens)
    high, low = (coarse >> 8) / 2.0**24, ((fine >> 8) + 0.5) / 2.0**48
    return -np.log(-np.log1p(-np.where(high < 0.5, high + low, high)))


def _threefry(key: tuple[np.ndarray, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def log_probabilities(dtype: str) -> Callable[[Shared], Finding]:
    """Make the check that compares the log-probabilities of engine and trainer in ``dtype`` with float64."""

    def check(shared: Shared) -> Finding:
        build = shared.build(dtype)
        if wrong := _wrong_types(build, dtype):
            return Finding("broken", f"all numbers must be {dtype}, got {wrong}", REPORT)
        with build.exact():
            asked, completions = build.sample()
            prompts = [request.token_ids for request in asked]
            trainer_RT = build.learner.logprobs(prompts, completions)
        gaps: dict[str, list[float]] = {"engine": [], "trainer": []}
        for row, (c, full_TV) in enumerate(zip(completions, build.reference(prompts, completions), strict=True)):
            exact = full_TV[np.arange(len(c.token_ids)), c.token_ids]
            gaps["engine"] += np.abs(c.logprobs - exact).tolist()
            gaps["trainer"] += np.abs(trainer_RT[row, : len(exact)] - exact).tolist()
        measure, kind = (max, "the largest") if dtype == "float32" else (np.mean, "the mean")
        found = {side: float(measure(values)) for side, values in gaps.items()}
        bound = EXACT[build.platform] if dtype == "float32" else probe_bound(dtype, build.config.rollout)
        worst = max(found, key=lambda side: found[side] if found[side] == found[side] else math.inf)
        text = f"the {worst}'s log-probabilities in {dtype}, {kind} of {len(gaps[worst])},"
        finding = within(found[worst], bound, text, f"see the rows above; else {REPORT}")
        return replace(finding, figures=found)

    return check


def _wrong_types(build: Build, dtype: str) -> str:
    """Name the first array of trainer, engine or cache whose type is not ``dtype``; empty if there is none."""
    cache = dtype if build.config.rollout.kv_dtype == "auto" else None
    found = {f"the trainer's {name}": leaf.dtype for name, leaf in named_leaves(build.learner.params()).items()}
    rounded = (QUANTIZED, SCALE) if build.config.rollout.weights_dtype == "int8" else ()
    specs = build.engine.weight_specs.items()
    found |= {f"the engine's {name}": spec.dtype for name, spec in specs if not name.endswith(rounded)}
    if cache is not None and build.engine.options.attention != "gather":  # gather keeps bfloat16's bits as integers
        found["the engine's cache"] = build.engine.cache_specs[0].dtype
    return next((f"{name} in {kind}" for name, kind in found.items() if kind != jnp.dtype(dtype)), "")


def decode_loop(shared: Shared) -> Finding:
    """Compare greedy tokens with float64, and all tokens with those of a second engine (2 rows, 1 step a launch)."""
    build = shared.build("float32")
    with build.exact():
        asked, completions = build.sample()
        greedy = [row for row, request in enumerate(asked) if request.sampling.temperature == 0.0]
        chosen = [completions[row] for row in greedy]
        for row, full_TV in zip(greedy, build.reference([asked[r].token_ids for r in greedy], chosen), strict=True):
            ids = completions[row].token_ids
            behind = full_TV.max(-1) - full_TV[np.arange(len(ids)), ids]
            if (unlikely := behind > 2 * EXACT[build.platform]).any():
                place = int(np.argmax(unlikely))
                text = f"greedy token {place} of row {row} is {behind[place]:.2g} less likely than the likeliest"
                return Finding("broken", text, f"see the rows above; else {REPORT}")
        options = replace(
            build.engine.options, steps_per_launch=1, max_running_requests=2, batch_paddings=None, prefill_tokens=64
        )
        tensor, devices = build.meshes.tensor, build.meshes.sampler_devices
        other = Replicas.build(build.checkpoint.directory, devices, tensor, options, build.hosts)
        assert build.engines.sync is not None
        weights, _ = build.engines.sync(named_leaves(build.learner.params()))
        build.engines.replicas.install_weights(weights)
        other.install_weights(weights)
        again, engine = other.generate(asked), next(iter(other.engines.values()))
        before = engine.use
        other.generate(asked)
    spent = engine.use - before  # without compiling
    launches = spent.launches + spent.prefills
    shared.rates["launch_seconds"] = (spent.schedule + spent.launch + spent.collect) / max(1, launches)
    differ = [
        row for row, (a, b) in enumerate(zip(completions, again, strict=True)) if (a.token_ids != b.token_ids).any()
    ]
    if differ:
        text = f"rows {differ} get other tokens with 2 rows at once and 1 step a launch"
        return Finding("broken", text, f"try rollout.steps_per_launch=1, and {REPORT}")
    steps = f"{build.engine.steps_per_launch} and 1 steps a launch"
    return Finding("works", f"greedy tokens are float64's; all {len(asked)} rows are the same with {steps}, and 2 rows")


def scored_rollout(build: Build, groups: int, prompt_tokens: int, new_tokens: int) -> ScoredRollout:
    """Return a scored rollout of random tokens, in which rewards differ only in the first ``groups`` groups.

    The completions of the other groups have 1 token and reward 0. The engine's log-probabilities are those of the
    trainer, so that all ratios are 1.
    """
    config, rng = build.config, np.random.default_rng(4)
    size, rows, vocabulary = config.algorithm.group_size, config.batch_rows, build.checkpoint.config.vocab_size
    lengths = [max(1, new_tokens - row % 3) if row < groups * size else 1 for row in range(rows)]
    prompts = [tuple(rng.integers(0, vocabulary, prompt_tokens).tolist()) for _ in range(config.data.prompts_per_step)]
    completions = [
        Completion(rng.integers(0, vocabulary, n).astype(np.int32), np.full(n, -1.0, np.float32), "length", 0)
        for n in lengths
    ]
    found_BT = build.learner.logprobs([ids for ids in prompts for _ in range(size)], completions)
    completions = [
        replace(c, logprobs=found_BT[row, :n]) for row, (c, n) in enumerate(zip(completions, lengths, strict=True))
    ]
    totals = np.where(np.arange(rows) < groups * size, rng.normal(size=rows), 0.0)
    batch = PromptBatch(1, tuple(Prompt("", ids) for ids in prompts))
    rollout = Rollout(batch, size, tuple(completions), ("",) * rows, 0.0)
    return ScoredRollout(rollout, Scores(totals, {"made_up": totals}, 0.0))


def update(shared: Shared) -> Finding:
    """Compare the trainer's gradient with finite differences of the loss in float64, and update the policy."""
    build = shared.build("float32")
    new = min(build.config.rollout.max_new_tokens, NEW_TOKENS)
    with build.exact():
        scored = scored_rollout(build, INFORMATIVE, build.longest_prompt, new)
        gradients = build.learner.gradients(scored)
        build.learner.update(scored)
    published, along = _published(build.checkpoint, gradients), dict[str, np.ndarray]()
    for name, gradient in published.items():
        if squares := float(np.square(gradient, dtype=np.float64).sum()):
            along[name] = gradient / squares  # the loss's derivative in this direction is 1
    gap = abs(_slope(build, scored, along) / len(along) - 1.0)
    what = f"the gradients of {len(along)} of {len(published)} tensors, together,"
    return within(gap, GRADIENT[build.platform], what, f"try model.attention=dot, and {REPORT}")


def _published(checkpoint: Checkpoint, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert values under the trainer's names to tensors under the checkpoint's names."""
    found: dict[str, np.ndarray] = {}
    for leaf in checkpoint.family.all_leaves(checkpoint.config):
        found |= dict(leaf.publish(leaves[leaf.source]))
    return _fused(checkpoint, found)


def _slope(build: Build, scored: ScoredRollout, along: Mapping[str, np.ndarray]) -> float:
    """Return the loss's derivative in a direction, by central differences in float64.

    The loss is GRPO's (arXiv 2402.03300, equation 3): the mean over all rows of -A (the advantage) times the mean ratio
    of the row's tokens. Ratios are so near to 1 that they are not clipped.
    """
    size, rollout = scored.rollout.group_size, scored.rollout
    weights = read_weights(build.checkpoint.directory)
    rewards = scored.scores.total.reshape(-1, size)
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages_B = (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    rows = np.flatnonzero(advantages_B)
    prompts = [rollout.row_prompts[row].token_ids for row in rows]
    completions = [rollout.completions[row] for row in rows]

    def loss(step: float) -> float:
        moved = dict(weights) | {name: weights[name] + step * value for name, value in along.items()}
        total = 0.0
        for row, c, full_TV in zip(rows, completions, build.reference(prompts, completions, moved), strict=True):
            exact = full_TV[np.arange(len(c.token_ids)), c.token_ids]
            total -= advantages_B[row] * np.exp(exact - c.logprobs).mean()
        return total / len(advantages_B)

    relative = max(float(np.linalg.norm(value) / np.linalg.norm(weights[name])) for name, value in along.items())
    step = 1e-4 / relative
    return float((loss(step) - loss(-step)) / (2 * step))


def weight_sync(shared: Shared) -> Finding:
    """Move updated weights into the engines; compare every array, and log-probabilities, with the trainer's."""
    build = shared.build("float32")
    with build.exact():
        result = build.engines.install(build.learner.params())
        worst, gap = build.engines.worst_leaf(build.learner.params())
        if gap:
            text = f"after an update the sampler's {worst} is off by up to {gap:.2g}"
            return Finding("broken", text, f"every rollout would be of another policy; {REPORT}")
        build.sampled = None
        asked, completions = build.sample()
        trainer_RT = build.learner.logprobs([request.token_ids for request in asked], completions)
    gaps = [np.abs(row[: len(c.token_ids)] - c.logprobs).max() for row, c in zip(trainer_RT, completions, strict=True)]
    what = f"{len(build.engine.weight_specs)} leaves are the trainer's; engine against trainer is"
    finding = within(float(max(gaps)), EXACT[build.platform], what, REPORT)
    return replace(finding, figures={**finding.figures, "seconds": result.seconds, "bytes": result.bytes_moved})
