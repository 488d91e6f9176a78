"""Eight bits in place of thirty-two: codes by hand, bounds by theory, and the same codes on any mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.learner.toy import make_mesh
from tpu_grpo.learner.compact import Codes, block_size, compact, decode, encode, join_residual, split_residual

RNG = np.random.default_rng(0)


def coded(values: Any, block: int, *, signed: bool) -> tuple[list[Any], list[Any]]:
    found = encode(jnp.asarray(values, jnp.float32), block, signed=signed)
    return found.codes.tolist(), found.scales.tolist()


# --- codes -----------------------------------------------------------------------------------------------------------


def test_signed_codes_by_hand() -> None:
    # s = 4, so x = 1, -1, 1/2, 0 -> 127 * 2x / (1 + |x|) = 127, -127, 84.67, 0; s = 2: x = 1/3, 1 -> 63.5, 127
    codes, scales = coded([[4.0, -4.0, 2.0, 0.0], [2 / 3, 2.0, 0.0, -0.01]], 4, signed=True)
    assert scales == [[4.0], [2.0]]
    assert codes[0] == [127, -127, 85, 0]
    assert codes[1][1:] == [127, 0, -1]  # x = 0.005 -> 1.26
    assert codes[1][0] in (63, 64)  # 63.5, as near as float32 is to a third


def test_unsigned_codes_by_hand() -> None:
    # s = 16: v / s = 1, 1/4, 1/16, 0 -> 255 * sqrt = 255, 127.5 (to even: 128), 63.75, 0
    assert coded([[16.0, 4.0, 1.0, 0.0]], 4, signed=False) == ([[255, 128, 64, 0]], [[16.0]])


def test_decoding_by_hand() -> None:
    # c = 85 -> y = 85/127, x = y / (2 - y) = 85 / (254 - 85); c = 128 -> (128/255)^2
    signed = decode(Codes(jnp.array([[127, -127, 85, 0]], jnp.int8), jnp.array([[4.0]])))
    np.testing.assert_allclose(np.asarray(signed)[0], [4.0, -4.0, 4 * 85 / 169, 0.0], rtol=1e-6)
    unsigned = decode(Codes(jnp.array([[255, 128, 64, 0]], jnp.uint8), jnp.array([[16.0]])))
    np.testing.assert_allclose(
        np.asarray(unsigned)[0], [16.0, 16 * (128 / 255) ** 2, 16 * (64 / 255) ** 2, 0.0], rtol=1e-6
    )


def test_blocks_have_scales_of_their_own() -> None:
    codes, scales = coded([[1.0, 0.5, 1e-6, -1e-6]], 2, signed=True)
    assert codes == [[127, 85, 127, -127]]
    assert scales == [[1.0, pytest.approx(1e-6)]]


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_of_zeros_stays_zero(signed: bool) -> None:
    found = encode(jnp.zeros((2, 8)), 4, signed=signed)
    assert not np.asarray(found.codes).any()
    assert not np.asarray(found.scales).any()
    assert not np.asarray(decode(found)).any()


@pytest.mark.full
def test_what_is_positive_never_becomes_zero_as_a_second_moment() -> None:
    values = 10.0 ** RNG.uniform(-30, 0, (16, 64))
    found = encode(jnp.asarray(values, jnp.float32), 64, signed=False)
    assert np.asarray(found.codes).min() == 1
    assert np.asarray(decode(found)).min() > 0.0


# --- what the round trip loses ---------------------------------------------------------------------------------------


def drawn(signed: bool) -> np.ndarray:
    """Magnitudes over six decades, so that every region of the codes is met."""
    values = 10.0 ** RNG.uniform(-6, 0, (64, 64))
    return (values * RNG.choice([-1.0, 1.0], values.shape) if signed else values).astype(np.float32)


def test_first_moments_are_off_by_half_a_code_at_most() -> None:
    """x(y) = y / (2 - y) has the slope 2 / (2 - y)^2 = (1 + x)^2 / 2: half a code is (1 + x)^2 / 508 near x."""
    values = drawn(signed=True)
    scales = np.abs(values).max(axis=1, keepdims=True).astype(np.float64)
    share = np.abs(values) / scales
    back = np.asarray(decode(encode(jnp.asarray(values), 64, signed=True)), np.float64)
    upper = 1 + share + 1 / 127  # the slope grows with x: take it where half a code further may lie
    assert (np.abs(back - values) / scales <= upper**2 / 508 * (1 + 1e-5)).all()
    assert (np.sign(back) * np.sign(values) >= 0).all()
    fine, coarse = share < 0.01, share > 0.9
    spacing = [np.abs(back - values)[part].max() / scales.max() for part in (fine, coarse)]
    assert spacing[0] < spacing[1] / 2  # finer near 0


def test_second_moments_are_off_by_half_a_code_of_their_root_at_most() -> None:
    values = drawn(signed=False)
    roots = np.sqrt(values.astype(np.float64))
    largest = roots.max(axis=1, keepdims=True)
    back = np.sqrt(np.asarray(decode(encode(jnp.asarray(values), 64, signed=False)), np.float64))
    off, tiny = np.abs(back - roots) / largest, roots / largest < 0.5 / 255
    assert (off[~tiny] <= 0.5 / 255 * (1 + 1e-4)).all()
    assert (off[tiny] <= 1 / 255 * (1 + 1e-4)).all()  # kept from zero: a whole code
    assert tiny.any()


# --- blocks and meshes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec", "block"),
    [
        ((8, 128), (None, None), 64),
        ((8, 128), (None, "fsdp"), 64),
        ((8, 96), (None, None), 48),
        ((8, 96), (None, "fsdp"), 48),
        ((8, 96), ("fsdp", "tp"), 48),
        ((8, 200), (None, ("fsdp", "tp")), 50),
        ((8, 16), (None, "fsdp"), 8),
        ((134,), ("fsdp",), 1),  # 67 is prime and too long
        ((5,), (None,), 5),
    ],
)
def test_a_block_lies_within_one_shard(shape: tuple[int, ...], spec: tuple[Any, ...], block: int) -> None:
    sharding = NamedSharding(make_mesh(2, 2), PartitionSpec(*spec))
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    assert block_size(leaf) == block
    assert sharding.shard_shape(shape)[-1] % block == 0


def on_meshes(function: Callable[[jax.Array], Any], values: np.ndarray) -> list[list[np.ndarray]]:
    """What a program gives on 1, 2 and 4 devices, with both axes split."""
    found = []
    for fsdp, tp in ((1, 1), (2, 1), (2, 2)):
        sharding = NamedSharding(make_mesh(fsdp, tp), PartitionSpec("fsdp", "tp"))
        result = jax.jit(function)(jax.device_put(values, sharding))
        found.append([np.asarray(part) for part in jax.tree.leaves(result)])
    return found


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_same_on_every_mesh(signed: bool) -> None:
    one, *others = on_meshes(lambda values: encode(values, 32, signed=signed), drawn(signed))
    for other in others:
        assert [part.tobytes() for part in one] == [part.tobytes() for part in other]


@pytest.mark.full
def test_residuals_are_the_same_on_every_mesh() -> None:
    one, *others = on_meshes(lambda values: split_residual(values, jax.random.key(3)), drawn(signed=True))
    for other in others:
        assert [part.tobytes() for part in one] == [part.tobytes() for part in other]


# --- the state of an optimizer ---------------------------------------------------------------------------------------


def test_what_has_a_parameters_shape_is_kept_in_eight_bits_and_the_rest_is_not() -> None:
    tx = compact(optax.scale_by_adam(), {"w": 2, "b": 3})
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(3)}
    state = jax.eval_shape(tx.init, params)
    types = {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert types == {
        ".count": "int32",
        ".mu['b'].codes": "int8",
        ".mu['b'].scales": "float32",
        ".mu['w'].codes": "int8",
        ".mu['w'].scales": "float32",
        ".nu['b'].codes": "uint8",
        ".nu['b'].scales": "float32",
        ".nu['w'].codes": "uint8",
        ".nu['w'].scales": "float32",
    }


@pytest.mark.full
def test_every_part_of_optax_that_is_never_negative_is_stored_so() -> None:
    """Second moments under other names; as signed codes the small ones would become zero, and be divided by."""
    for tx in (optax.scale_by_amsgrad(), optax.scale_by_rss(), optax.scale_by_rms(), optax.scale_by_adadelta()):
        state = jax.eval_shape(compact(tx, {"w": 4}).init, {"w": jnp.ones(4)})
        kinds = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        codes = {name: kind for name, kind in kinds.items() if name.endswith(".codes") and ".mu" not in name}
        assert codes
        assert set(codes.values()) == {np.dtype(np.uint8)}, kinds


def test_what_belongs_to_a_group_of_parameters_is_left_alone() -> None:
    """optax.partition names its groups as parameters are named: a count is no parameter's."""
    tx = optax.partition({"a": optax.scale_by_adam(), "b": optax.scale_by_lion()}, {"w": "a", "b": "b"})
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(3)}
    state = jax.eval_shape(compact(tx, {"w": 4, "b": 3}).init, params)
    names = {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(state) if leaf.size > 1}
    assert len(names) == 5  # codes of mu and nu of w and their scales, one for each of two rows, and codes of mu of b
    assert all("['w']" in name or name.endswith("mu['b'].codes") for name in names)


def test_two_steps_of_adam_in_eight_bits_by_hand() -> None:
    """The first step is that of Adam; the second starts from decoded moments."""
    b1, b2 = 0.9, 0.95
    gradients = np.array([[0.5, -2.0, 1.0, 0.01], [1.0, 1.0, -1.0, 0.5]])
    tx = compact(optax.scale_by_adam(b1=b1, b2=b2, eps=1e-8), {"w": 4})
    params = {"w": jnp.zeros(4)}
    state, steps = tx.init(params), []
    for gradient in gradients:
        updates, state = tx.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        steps.append(np.asarray(jax.tree.leaves(updates)[0]))
    np.testing.assert_allclose(steps[0], np.sign(gradients[0]), rtol=1e-5)
    first, second = (1 - b1) * gradients[0], (1 - b2) * gradients[0] ** 2
    x = np.abs(first) / np.abs(first).max()
    code = np.round(127 * 2 * x / (1 + x)) / 127
    first = np.sign(first) * np.abs(first).max() * code / (2 - code)
    second = second.max() * (np.maximum(np.round(255 * np.sqrt(second / second.max())), 1) / 255) ** 2
    first = b1 * first + (1 - b1) * gradients[1]
    second = b2 * second + (1 - b2) * gradients[1] ** 2
    expected = first / (1 - b1**2) / (np.sqrt(second / (1 - b2**2)) + 1e-8)
    np.testing.assert_allclose(steps[1], expected, rtol=1e-5)


# --- what bfloat16 leaves out ----------------------------------------------------------------------------------------


def ulps(rounded: np.ndarray) -> np.ndarray:
    """The distance to the next bfloat16 away from zero, float64."""
    exponents = np.frexp(rounded.astype(np.float64))[1] - 1
    return 2.0 ** (exponents - 7)


def joined(values: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rounded, residual = split_residual(jnp.asarray(values, jnp.float32), jax.random.key(seed))
    back = join_residual(rounded, residual)
    return np.asarray(back, np.float64), np.asarray(rounded.astype(jnp.float32)), np.asarray(residual)


def test_a_residual_is_off_by_less_than_one_unit() -> None:
    values = drawn(signed=True)
    back, rounded, residual = joined(values)
    assert (np.abs(back - values) < ulps(rounded) * (1 / 254 + 2**-16)).all()  # a unit, and float32's own rounding
    np.testing.assert_array_equal(rounded, np.asarray(jnp.asarray(values).astype(jnp.bfloat16).astype(jnp.float32)))
    assert (residual.min(), residual.max()) == (-127, 127)
    assert np.abs(back - values).max() < np.abs(rounded - values).max() / 50  # bfloat16 alone is off by half an ulp


def test_residuals_by_hand() -> None:
    # Next to 1 bfloat16 has steps of 1/128 above (and half of that below): a unit is 1 / (128 * 254).
    unit = 1 / 128 / 254
    values = np.array([1 + 50 * unit, 1 - 50 * unit, -1 - 50 * unit, 2 + 2 * 3 * unit, 1.0, -0.5, 0.0])
    back, rounded, residual = joined(values.astype(np.float32))
    np.testing.assert_array_equal(rounded, [1, 1, -1, 2, 1, -0.5, 0])
    assert (np.abs(residual - [50, -50, -50, 3, 0, 0, 0]) <= 1).all()  # float32 holds 50 units to 1e-3 of one
    assert [*residual[4:], back[6]] == [0, 0, 0, 0]
    np.testing.assert_allclose(back, values, atol=2 * unit)


def test_what_bfloat16_holds_comes_back_exactly() -> None:
    held = np.concatenate([2.0 ** np.arange(-100, 100), -(2.0 ** np.arange(-100, 100)), [0.0, 1.5, -3.0, 255.0]])
    for seed in range(5):
        back, _, residual = joined(held, seed)
        assert not residual.any()
        np.testing.assert_array_equal(back, held)


@pytest.mark.full
def test_numbers_below_the_normal_ones_stay_as_small_and_nothing_becomes_nan() -> None:
    values = np.array([0.0, -0.0, 1e-45, -1e-40, 1e-38, 2.0**-126, -(2.0**-126), 3e-38], np.float32)
    back, *_ = joined(values)
    assert np.isfinite(back).all()
    assert (np.abs(back - values.astype(np.float64)) <= 2.0**-125).all()


@pytest.mark.full
@pytest.mark.parametrize("value", [1.0 + 1e-5, -3.0 - 3e-5, 0.75 + 1.7e-6, 1.0 - 2.2e-5, 0.1], ids=str)
def test_residuals_are_right_on_average(value: float) -> None:
    """A step far below a unit arrives as often as it is large: the mean over keys is within 4 standard errors."""
    count = 4096
    values = jnp.full((count, 16), value, jnp.float32)
    keys = jax.random.split(jax.random.key(1), count)
    rounded, residual = jax.vmap(split_residual)(values, keys)
    units = np.asarray(residual, np.float64).ravel()
    half = ulps(np.asarray(rounded[0, :1].astype(jnp.float32)))[0] / 2
    exact = (float(np.float32(value)) - float(rounded[0, 0])) / half * 127
    assert set(units) <= {np.floor(exact), np.ceil(exact)}
    assert abs(units.mean() - exact) < 4 * np.sqrt(0.25 / units.size)


@pytest.mark.full
def test_steps_that_bfloat16_would_lose_add_up() -> None:
    """1000 steps of 1e-7 from 1.0, each less than a unit of the residual: 1e-4 arrives, give or take the noise."""
    step, count, width = 1e-7, 1000, 64
    unit = 1 / 128 / 254

    def one(carry: Any, key: Any) -> tuple[Any, None]:
        return split_residual(join_residual(*carry) + step, key), None

    start = split_residual(jnp.ones(width), jax.random.key(0))
    (rounded, residual), _ = jax.lax.scan(one, start, jax.random.split(jax.random.key(2), count))
    moved = np.asarray(join_residual(rounded, residual), np.float64) - 1
    # Each rounding has a variance of at most unit^2 / 4; float32 near 1 rounds 1e-7 to 2^-23 = 1.19e-7.
    error = np.sqrt(count / 4) * unit / np.sqrt(width)
    assert moved.mean() == pytest.approx(count * 2.0**-23, abs=4 * error)
    assert (moved > 0).any()
