"""Log-probabilities and entropies in chunks: values, gradients, what is alive, what moves, and what is skipped.

The expected numbers are NumPy's in float64. Its gradients are complex steps, Im f(x + ih) / h, of the plain formulas:
exact to float64, and free of any derivative worked out by hand.
"""

import functools
import math
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tests.learner.toy import make_mesh
from tpu_grpo.learner import output_head
from tpu_grpo.learner.output_head import (
    BLOCK_BYTES,
    OutputHead,
    block_columns,
    chunk_tokens,
    chunks_needed,
    likeliest_tokens,
    most_chunk_bytes,
    token_logprobs,
    vocab_axes,
)

ROWS, TOKENS, WIDTH, VOCAB = 4, 7, 4, 12
WANTED = {
    "uneven": ([1, 0, 1, 1, 0, 1, 1], [0] * 7, [0, 0, 0, 0, 0, 0, 1], [1] * 7),
    "all": ([1] * 7,) * 4,
    "none": ([0] * 7,) * 4,
}


@dataclass(frozen=True)
class Case:
    """Inputs, and a loss sum(a * log-probability + c * entropy)."""

    wanted: str = "uneven"
    temperature: float = 1.0
    soft_cap: float | None = None
    vocab_first: bool = True
    chunk: int = 3
    """Tokens of a chunk."""
    block: int | None = None
    """The part of the vocabulary that the backward pass goes through at a time; None for all of it."""
    vocab: int = VOCAB
    dtype: Any = jnp.float32
    weigh: tuple[float, float] = (1.0, 1.0)
    """Multiplies a and c."""
    filtered: bool = False
    """Whether each target was drawn among some of the likeliest tokens."""
    seed: int = field(default=0, kw_only=True)

    def inputs(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        shape = (ROWS, TOKENS)

        def drawn(*size: int) -> np.ndarray:
            return rng.normal(size=size).astype(self.dtype).astype(np.float64)

        return {
            "hidden": drawn(*shape, WIDTH),
            "weight_VD": drawn(self.vocab, WIDTH),
            "targets": rng.integers(0, self.vocab, shape),
            "a": self.weigh[0] * rng.normal(size=shape).astype(np.float32).astype(np.float64),
            "c": self.weigh[1] * rng.normal(size=shape).astype(np.float32).astype(np.float64),
            "wanted": np.array(WANTED[self.wanted], bool),
            "kept": rng.integers(1, self.vocab + 1, shape) if self.filtered else None,
        }


def expected_values(case: Case, hidden: np.ndarray, weight_VD: np.ndarray, **inputs: Any) -> tuple[Any, Any]:
    """The formulas, for real or complex numbers."""
    logits = hidden @ weight_VD.T
    if case.soft_cap is not None:
        logits = case.soft_cap * np.tanh(logits / case.soft_cap)
    powers = np.exp(logits / case.temperature)
    if case.filtered:  # the likeliest, and the target, which need not be one of them
        places = np.argsort(np.argsort(-np.real(logits), axis=-1), axis=-1)
        powers = powers * (
            (places < inputs["kept"][..., None]) | (np.arange(case.vocab) == inputs["targets"][..., None])
        )
    p = powers / powers.sum(axis=-1, keepdims=True)
    logps = np.log(np.take_along_axis(p, inputs["targets"][..., None], -1)[..., 0])
    entropies = -(p * np.log(np.where(p == 0, 1, p))).sum(axis=-1)
    return np.where(inputs["wanted"], logps, 0), np.where(inputs["wanted"], entropies, 0)


def expected_gradients(case: Case) -> tuple[np.ndarray, np.ndarray]:
    inputs = case.inputs()

    def loss(**changed: Any) -> complex:
        logps, entropies = expected_values(case, **{**inputs, **changed})
        return (inputs["a"] * logps + inputs["c"] * entropies).sum()

    def by(name: str) -> np.ndarray:
        gradient = np.zeros_like(inputs[name])
        for at in np.ndindex(gradient.shape):
            stepped = inputs[name].astype(complex)
            stepped[at] += 1e-30j
            gradient[at] = loss(**{name: stepped}).imag / 1e-30
        return gradient

    return by("hidden"), by("weight_VD")


def traced(
    hidden: Any,
    weight: Any,
    targets: Any,
    wanted: Any,
    a: Any,
    c: Any,
    *,
    vocab_first: bool,
    soft_cap: Any,
    kept: Any = None,
    **more: Any,
) -> tuple[Any, Any]:
    """Gradients by hidden states and weight; log-probabilities and entropies."""

    def loss(hidden: Any, weight: Any) -> tuple[Any, Any]:
        hidden = jnp.where(wanted[..., None], hidden, jnp.nan)  # what is not wanted may be anything
        head = OutputHead(weight, vocab_first, soft_cap)
        logps, entropies, _ = token_logprobs(hidden, head, targets, wanted, kept_BT=kept, **more)
        return (a * logps + c * entropies).sum(), (logps, entropies)

    return jax.grad(loss, (0, 1), has_aux=True)(hidden, weight)


STATIC = ("vocab_first", "soft_cap", "temperature", "mesh", "chunk_bytes", "block_bytes")
program = jax.jit(traced, static_argnames=STATIC)


def found(case: Case, mesh: Mesh | None = None, program: Any = program) -> dict[str, np.ndarray]:
    """What the compiled program gives, in the order of the formulas."""
    inputs = case.inputs()
    weight = inputs["weight_VD"] if case.vocab_first else inputs["weight_VD"].T
    arrays = {"hidden": inputs["hidden"].astype(case.dtype), "weight": weight.astype(case.dtype)}
    arrays |= {name: inputs[name].astype(np.float32) for name in ("a", "c")}
    arrays |= {"targets": inputs["targets"].astype(np.int32), "wanted": inputs["wanted"]}
    if case.filtered:
        arrays["kept"] = inputs["kept"].astype(np.int32)
    if mesh is not None:
        rows = NamedSharding(mesh, P("fsdp"))
        arrays = {name: jax.device_put(array, rows) for name, array in arrays.items() if name != "weight"}
        arrays["weight"] = jax.device_put(weight.astype(case.dtype), weight_sharding(case, mesh))
    gradients, (logps, entropies) = program(
        **arrays,
        vocab_first=case.vocab_first,
        soft_cap=case.soft_cap,
        temperature=case.temperature,
        mesh=mesh,
        chunk_bytes=chunk_bytes(case, mesh),
        block_bytes=4 * WIDTH * (case.block or case.vocab),
    )
    assert {logps.dtype, entropies.dtype} == {jnp.dtype(np.float32)}
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(case.dtype)}
    by_hidden, by_weight = (np.asarray(gradient).astype(np.float64) for gradient in gradients)
    return {
        "logps": np.asarray(logps),
        "entropies": np.asarray(entropies),
        "hidden": by_hidden,
        "weight": by_weight if case.vocab_first else by_weight.T,
    }


def weight_sharding(case: Case, mesh: Mesh) -> NamedSharding:
    """How Tunix shards an embedding, and an output head of its own, where the mesh divides them."""
    fits = case.vocab % mesh.shape["tp"] == 0 and WIDTH % mesh.shape["fsdp"] == 0
    axes = ("tp", "fsdp") if case.vocab_first else ("fsdp", "tp")
    return NamedSharding(mesh, P(*axes) if fits else P())


def chunk_bytes(case: Case, mesh: Mesh | None) -> int:
    """As many bytes as the chunk's float32 logits take on a device."""
    if mesh is None:
        return 4 * case.chunk * case.vocab
    axes = vocab_axes(case.vocab, mesh)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return 4 * case.chunk * case.vocab // parts * (mesh.shape["fsdp"] if "fsdp" in axes else 1)


def assert_close(found: np.ndarray, expected: np.ndarray, relative: float = 1e-6) -> None:
    """Errors are relative to the largest number: entries are sums, of which some are small by cancellation."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=relative * max(np.abs(expected).max(), 1e-30))


def assert_as_expected(case: Case, mesh: Mesh | None = None) -> None:
    values, inputs = found(case, mesh), case.inputs()
    logps, entropies = expected_values(case, **inputs)
    assert_close(values["logps"], logps)
    assert_close(values["entropies"], entropies)
    by_hidden, by_weight = expected_gradients(case)
    assert_close(values["hidden"], by_hidden)
    assert_close(values["weight"], by_weight)
    unwanted = ~inputs["wanted"]
    assert not values["logps"][unwanted].any()
    assert not values["entropies"][unwanted].any()
    assert not values["hidden"][unwanted].any()


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(weigh=(1.0, 0.0)),
        Case(weigh=(0.0, 1.0)),
        Case(temperature=0.7),
        Case(soft_cap=2.5),
        Case(soft_cap=2.5, temperature=1.4, vocab_first=False),
        Case(vocab_first=False),
        Case(wanted="all"),  # 28 tokens in chunks of 3
        Case(wanted="none"),
        *(Case(chunk=chunk) for chunk in (1, 16, 28)),
        Case(block=4),  # three blocks
        Case(block=1, wanted="all"),
        Case(block=8, vocab_first=False, soft_cap=2.5, temperature=0.7),  # a block of 8 and one of 4
        Case(block=8, vocab=40, filtered=True),
        Case(filtered=True),
        Case(filtered=True, soft_cap=2.5, temperature=0.7, vocab_first=False, vocab=40),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_float64(case: Case) -> None:
    assert_as_expected(case)


def test_a_distribution_by_hand() -> None:
    # Logits log 1, log 2, log 5 at temperature 1: p = 1/8, 1/4, 5/8. Half the temperature squares: 1/30, 4/30, 25/30.
    weight = jnp.log(jnp.array([[1.0], [2.0], [5.0]]))
    head, targets, wanted = OutputHead(weight, vocab_first=True), jnp.array([[1, 2]]), jnp.array([[True, True]])
    for temperature, p in ((1.0, np.array([1, 2, 5]) / 8), (0.5, np.array([1, 4, 25]) / 30)):
        run = jax.jit(partial(token_logprobs, temperature=temperature, mesh=None))
        logps, entropies, _ = run(jnp.ones((1, 2, 1)), head, targets, wanted)
        np.testing.assert_allclose(logps, [np.log(p[[1, 2]])], rtol=1e-6)
        np.testing.assert_allclose(entropies, [[-(p * np.log(p)).sum()] * 2], rtol=1e-6)


def test_logits_far_from_zero_do_not_overflow() -> None:
    # p of (1000, 999, -1000) is that of (1, 0, -inf).
    head = OutputHead(jnp.array([[1000.0], [999.0], [-1000.0]]), vocab_first=True)
    run = jax.jit(partial(token_logprobs, temperature=1.0, mesh=None))
    logps, entropies, _ = run(jnp.ones((1, 1, 1)), head, jnp.array([[1]]), jnp.array([[True]]))
    p = 1 / (1 + np.e)
    np.testing.assert_allclose(logps, [[np.log(p)]], rtol=1e-6)
    np.testing.assert_allclose(entropies, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], rtol=1e-6)


def test_bfloat16_matrices_give_float32_logits() -> None:
    """The error is far below that of logits rounded to bfloat16, which is shown beside it."""
    case = Case(wanted="all", dtype=jnp.bfloat16, vocab_first=False)
    values, inputs = found(case), case.inputs()
    logps, entropies = expected_values(case, **inputs)
    assert_close(values["logps"], logps)
    assert_close(values["entropies"], entropies)
    logits = jnp.asarray(inputs["hidden"] @ inputs["weight_VD"].T).astype(jnp.bfloat16).astype(jnp.float32)
    rounded = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), inputs["targets"][..., None], -1)[..., 0]
    assert np.abs(rounded - logps).max() > 1e-3 * np.abs(logps).max()
    # Gradients pass through bfloat16 once before their products, and are returned in it: 2^-9 each time, at most.
    for gradient, expected in zip((values["hidden"], values["weight"]), expected_gradients(case), strict=True):
        assert_close(gradient, expected, relative=2 * 2.0**-9)


@pytest.mark.parametrize("block", [2, 1])
def test_the_gradient_of_the_weight_is_summed_in_float32(block: int) -> None:
    """512 equal tokens in chunks of 1 each add 2^-9 g to an entry: bfloat16 sums would stop growing at half of it."""
    tokens = 512
    weight = jnp.zeros((2, 1), jnp.bfloat16)  # p = 1/2, 1/2, so that each token adds g / 2 and -g / 2
    arrays = (jnp.zeros((1, tokens), jnp.int32), jnp.ones((1, tokens), bool))

    def loss(weight: Any) -> Any:
        head, hidden = OutputHead(weight, vocab_first=True), jnp.ones((1, tokens, 1), jnp.bfloat16)
        sizes: Any = {"chunk_bytes": 8, "block_bytes": 4 * block}
        return token_logprobs(hidden, head, *arrays, temperature=1.0, mesh=None, **sizes)[0].sum()

    assert jax.jit(jax.grad(loss))(weight).tolist() == [[tokens / 2], [-tokens / 2]]


# --- meshes ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("fsdp", "tp", "vocab", "vocab_first"),
    [
        (4, 1, 12, True),
        (4, 1, 12, False),
        (2, 2, 12, True),
        (2, 2, 12, False),
        (1, 4, 12, True),
        (2, 2, 10, False),  # tp alone divides the vocabulary
        (2, 2, 9, True),  # neither divides it
        (1, 1, 12, True),
    ],
)
def test_meshes_give_what_one_device_gives(fsdp: int, tp: int, vocab: int, vocab_first: bool) -> None:
    case = Case(vocab=vocab, vocab_first=vocab_first, soft_cap=3.0, temperature=0.8, chunk=2)
    assert_as_expected(case, make_mesh(fsdp, tp))


@pytest.mark.full
@pytest.mark.parametrize(("fsdp", "tp", "vocab"), [(2, 2, 12), (4, 1, 12), (2, 2, 9)])
def test_tokens_are_left_out_alike_on_meshes(fsdp: int, tp: int, vocab: int) -> None:
    assert_as_expected(Case(vocab=vocab, filtered=True, chunk=2), make_mesh(fsdp, tp))


# --- what is alive, what moves, and what is skipped ------------------------------------------------------------------

BIG_VOCAB, BIG_WIDTH, BIG_TOKENS, BIG_CHUNK = 4 * 257, 24, 4 * 150, 16
"""Of 600 tokens a chunk has 16. No other dimension is 257 or a multiple of it."""


@functools.cache
def compiled(mesh: Mesh | None, vocab_first: bool, *, head_trained: bool = True) -> str:
    """The compiled forward and backward pass, gradients sharded like their arrays."""

    def described(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh and NamedSharding(mesh, P(*spec)))

    rows = (4, BIG_TOKENS // 4)
    weight = (
        described((BIG_VOCAB, BIG_WIDTH), jnp.float32, "tp", "fsdp")
        if vocab_first
        else described((BIG_WIDTH, BIG_VOCAB), jnp.float32, "fsdp", "tp")
    )
    case = Case(vocab=BIG_VOCAB, chunk=BIG_CHUNK)
    arguments = (
        described((*rows, BIG_WIDTH), jnp.float32, "fsdp"),
        weight,
        described(rows, jnp.int32, "fsdp"),
        described(rows, jnp.bool_, "fsdp"),
    )

    def loss(hidden: Any, weight: Any, targets: Any, wanted: Any) -> Any:
        arrays = (hidden, OutputHead(weight, vocab_first), targets, wanted)
        logps, entropies, _ = token_logprobs(*arrays, temperature=1.0, mesh=mesh, chunk_bytes=chunk_bytes(case, mesh))
        return (logps - entropies).sum()

    trained = (0, 1) if head_trained else (0,)
    layout = tuple(arguments[index].sharding for index in trained)
    run = jax.jit(jax.grad(loss, trained), out_shardings=layout if mesh else None)
    text = run.lower(*arguments).compile().as_text()
    assert text is not None
    return text


def shapes(text: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, found.split(","))) for found in re.findall(r"\b[a-z]+\d*\[(\d+(?:,\d+)*)\]", text)}


def collectives(text: str) -> list[tuple[str, int]]:
    """(name, elements of its largest result) of everything that moves between devices."""
    found = re.findall(r" = (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", text)
    return [(name, max(map(math.prod, shapes(results)), default=1)) for results, name in found]


@pytest.mark.full
@pytest.mark.parametrize("vocab_first", [True, False])
@pytest.mark.parametrize(("fsdp", "tp"), [(1, 1), (4, 1), (2, 2)])
def test_no_logits_but_those_of_a_chunk_are_ever_alive(fsdp: int, tp: int, vocab_first: bool) -> None:
    devices = fsdp * tp
    text = compiled(make_mesh(fsdp, tp) if devices > 1 else None, vocab_first)
    with_vocabulary = {shape for shape in shapes(text) if any(size % 257 == 0 for size in shape)}
    columns = BIG_VOCAB // devices
    seen = BIG_CHUNK * fsdp  # tokens of a chunk that a device sees
    largest = max(math.prod(shape) for shape in with_vocabulary)
    assert largest == max(seen, BIG_WIDTH) * columns < BIG_TOKENS * columns
    if devices > 1:
        moved = collectives(text)
        assert max(size for _, size in moved) < BIG_VOCAB * BIG_WIDTH // 2  # not the whole head
        assert max(size for name, size in moved if name != "all-to-all") <= seen * BIG_WIDTH  # a chunk's hidden states
        assert [name for name, _ in moved].count("all-to-all") == 2  # the weight, and its gradient


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [1, 4])
def test_the_gradient_of_a_frozen_head_is_not_summed(fsdp: int) -> None:
    """The compiler finds that nobody reads it: of three products of the backward pass two are left."""
    mesh = make_mesh(fsdp) if fsdp > 1 else None
    programs = (compiled(mesh, True), compiled(mesh, True, head_trained=False))
    trained, frozen = (len(re.findall(r" dot\(", text)) for text in programs)
    assert (trained, frozen) == (4, 3)  # with that of the forward pass


def test_chunks_add_to_the_gradient_of_a_block(monkeypatch: Any) -> None:
    """12 tokens of the vocabulary are a block of 8 and one of 4; nothing of all 12 is added to in the backward pass."""
    results = set[tuple[int, ...]]()
    product = output_head._product

    def seen(*arguments: Any) -> Any:
        results.add((result := product(*arguments)).shape)
        return result

    def loss(hidden: Any, weight: Any) -> Any:
        arrays = hidden, OutputHead(weight, vocab_first=True), jnp.zeros((1, 7), int), jnp.ones((1, 7), bool)
        sizes: Any = {"chunk_bytes": 4 * 3 * VOCAB, "block_bytes": 4 * WIDTH * 8}
        return token_logprobs(*arrays, temperature=1.0, mesh=None, **sizes)[0].sum()

    monkeypatch.setattr(output_head, "_product", seen)
    jax.eval_shape(jax.grad(loss, (0, 1)), jnp.zeros((1, 7, WIDTH)), jnp.zeros((VOCAB, WIDTH)))
    assert results == {(3, VOCAB), (3, 8), (8, WIDTH), (3, 4), (4, WIDTH), (3, WIDTH)}


@pytest.mark.parametrize(("wanted", "needed"), [("uneven", 5), ("all", 10), ("none", 0)])
def test_only_chunks_that_are_needed_are_computed(monkeypatch: Any, wanted: str, needed: int) -> None:
    """13, 28 and 0 tokens in chunks of 3, forward and backward."""
    computed: list[int] = []
    product = output_head._product

    def counted(*arguments: Any) -> Any:
        jax.debug.callback(computed.append, 1)
        return product(*arguments)

    monkeypatch.setattr(output_head, "_product", counted)
    found(Case(wanted), program=jax.jit(lambda **inputs: traced(**inputs), static_argnames=STATIC))
    jax.effects_barrier()
    assert len(computed) == 4 * needed  # logits twice, and a product for each gradient


# --- how the work is divided ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "fsdp", "tp", "axes"),
    [
        (12, 4, 1, ("fsdp",)),
        (12, 2, 2, ("tp", "fsdp")),
        (12, 1, 4, ("tp",)),
        (10, 2, 2, ("tp",)),
        (10, 1, 2, ("tp",)),
        (9, 3, 2, ("fsdp",)),
        (9, 2, 2, ()),
        (151936, 16, 1, ("fsdp",)),
    ],
)
def test_the_vocabulary_is_split_over_the_most_devices(vocab: int, fsdp: int, tp: int, axes: tuple[str, ...]) -> None:
    assert vocab_axes(vocab, jax.sharding.AbstractMesh((fsdp, tp), ("fsdp", "tp"))) == axes  # pyrefly: ignore[bad-argument-type]


def test_chunks_end_with_the_group_that_wants_most() -> None:
    wanted = np.zeros((4, 7), bool)
    for row, tokens in enumerate((5, 0, 1, 7)):
        wanted[row, 7 - tokens :] = True
    for groups, chunk, needed in ((1, 3, 5), (1, 13, 1), (1, 12, 2), (2, 3, 3), (4, 3, 3), (4, 7, 1)):
        assert chunks_needed(jnp.asarray(wanted), groups, chunk) == needed
    assert chunks_needed(jnp.zeros((4, 7), bool), 2, 3) == 0


@pytest.mark.parametrize(
    ("tokens", "logits_per_token", "budget", "chunk"),
    [
        (1000, 512, 4 * 512 * 900, 512),  # of at most 896: two
        (1000, 512, 4 * 512 * 1000, 1000),
        (1000, 512, 4 * 512 * 999, 512),
        (28, 12, 4 * 12 * 3, 3),  # 10 chunks, the last of 1
        (28, 12, 4 * 12 * 27, 16),
        (28, 12, 4, 1),  # a token is the least
        (4096, 151936, 256 * 2**20, 416),  # 441 would fit, 432 are whole tiles: 10 chunks of 410, rounded up
    ],
)
def test_chunks_are_as_equal_as_fits(tokens: int, logits_per_token: int, budget: int, chunk: int) -> None:
    assert chunk_tokens(tokens, logits_per_token, budget) == chunk


@pytest.mark.parametrize(
    ("columns", "width", "tokens"),
    [
        (151_936, 1024, 1024),  # Qwen3-0.6B on a chip: as many logits as the head has numbers
        (151_936 // 8, 1024, 3533),  # on eight chips, 256 MiB hold more than that
        (262_144, 1152, 640),  # Gemma 3 1B on a chip, at the limit of 640 MiB
    ],
)
def test_chunks_of_small_models_are_as_large_as_the_gradient_they_add_to(columns: int, width: int, tokens: int) -> None:
    assert most_chunk_bytes(columns, width) // (4 * columns) == tokens


@pytest.mark.parametrize(
    ("columns", "width", "block"),
    [
        (151_936, 1024, 8192),  # Qwen3-0.6B on a chip: 10,240 would fit
        (262_144, 1152, 8192),
        (128_256, 2048, 4096),  # Llama 1B
        (10_240, 1024, 10_240),
        (10_241, 1024, 8192),
        (300, 64, 300),  # a model of tests
    ],
)
def test_blocks_are_powers_of_two_whose_gradient_fits(columns: int, width: int, block: int) -> None:
    assert block_columns(columns, width, BLOCK_BYTES) == block


# --- further tokens, and the likeliest ones ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [None, pytest.param((2, 2), marks=pytest.mark.full)])
def test_the_likeliest_tokens_and_their_gradients(sizes: tuple[int, int] | None) -> None:
    """The gradient of sum(b x log p) is b (onehot - p) by the logits. A token may be asked for twice."""
    case, count, below = Case(soft_cap=None, temperature=0.7), 5, VOCAB - 2
    inputs, mesh = case.inputs(), None if sizes is None else make_mesh(*sizes)
    hidden, weight, wanted = inputs["hidden"], inputs["weight_VD"], inputs["wanted"]
    z = hidden @ weight.T / 0.7
    logps = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    order = np.argsort(-logps[..., :below], axis=-1)[..., :count]
    also = np.concatenate([order, order[..., :1], np.full((*order.shape[:2], 1), VOCAB - 1)], axis=-1)
    b = np.random.default_rng(3).normal(size=also.shape)

    @jax.jit
    def run(hidden: Any, weight: Any, wanted: Any, targets: Any, also: Any, b: Any) -> Any:
        sized = {"temperature": 0.7, "mesh": mesh, "chunk_bytes": chunk_bytes(case, mesh)}
        head = OutputHead(weight, vocab_first=True)
        top = likeliest_tokens(hidden, head, targets, wanted, count=count, below=below, **sized)

        def loss(hidden: Any, weight: Any) -> Any:
            own, _, its = token_logprobs(
                hidden, OutputHead(weight, vocab_first=True), targets, wanted, also_BTM=also, **sized
            )
            return (b * its).sum() + own.sum(), its

        return top, jax.grad(loss, (0, 1), has_aux=True)(hidden, weight)

    arrays = [hidden.astype(np.float32), wanted, inputs["targets"].astype(np.int32), also.astype(np.int32)]
    arrays.append(b.astype(np.float32))
    matrix = weight.astype(np.float32)
    if mesh is not None:
        arrays = [jax.device_put(array, NamedSharding(mesh, P("fsdp"))) for array in arrays]
        matrix = jax.device_put(matrix, weight_sharding(case, mesh))
    (own, ids, top), (gradients, its) = run(arrays[0], matrix, *arrays[1:])
    each = wanted[..., None]
    np.testing.assert_array_equal(ids, np.where(each, order, 0))
    bins = np.take_along_axis(logps, order, -1)
    bins = np.concatenate([bins, np.log(1 - np.exp(bins).sum(axis=-1, keepdims=True))], axis=-1)
    np.testing.assert_allclose(top, np.where(each, bins, 0), atol=1e-5)
    np.testing.assert_allclose(its, np.where(each, np.take_along_axis(logps, also, -1), 0), atol=1e-5)
    targets = inputs["targets"][..., None]
    np.testing.assert_allclose(own, np.where(wanted, np.take_along_axis(logps, targets, -1)[..., 0], 0), atol=1e-5)
    weights = np.concatenate([b, np.ones_like(b[..., :1])], axis=-1)
    chosen = np.eye(VOCAB)[np.concatenate([also, targets], axis=-1)]
    by_logits = (weights[..., None] * (chosen - np.exp(logps)[..., None, :])).sum(axis=-2) * each / 0.7
    np.testing.assert_allclose(gradients[0], by_logits @ weight, atol=2e-5)
    np.testing.assert_allclose(gradients[1], np.einsum("btv,btd->vd", by_logits, hidden), atol=2e-5)
