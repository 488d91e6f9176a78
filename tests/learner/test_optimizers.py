"""Optimizers by name: their first steps by hand or by NumPy, schedules, and what is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tests.goldens import compare, rows
from tests.learner.toy import make_config
from tpu_grpo.learner.optimizers import build_optimizer, learning_rate_schedule, longer_side, matrix_axes
from tpu_grpo.records.errors import ConfigError

MISTAKES = Path(__file__).with_name("optimizer_mistakes.txt")
Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)


def steps(directory: Path, params: Arrays, gradients: Sequence[Arrays], **optimizer: Any) -> list[Arrays]:
    """What is added to the parameters, which stay as they are, step by step."""
    config = make_config(directory, {"optimizer": {"learning_rate": 0.1, **optimizer}})
    held = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    tx = build_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.updates), held)
    update, state, found = jax.jit(tx.update), jax.jit(tx.init)(held), []
    for gradient in gradients:
        made, state = update({name: jnp.asarray(value, jnp.float32) for name, value in gradient.items()}, state, held)
        found.append({name: np.asarray(value) for name, value in made.items()})
    return found


def of_one(directory: Path, gradients: Sequence[Sequence[float]], **optimizer: Any) -> list[list[float]]:
    """The same of one vector of zeros."""
    made = steps(directory, {"w": np.zeros(len(gradients[0]))}, [{"w": np.array(g)} for g in gradients], **optimizer)
    return [step["w"].tolist() for step in made]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_adamw_by_hand(tmp_path: Path) -> None:
    """The first step is the sign of the gradient; decay adds rate * decay * weight."""
    (first,) = steps(tmp_path, {"w": np.array([2.0, -4.0])}, [{"w": np.array([3.0, 4.0])}], weight_decay=0.5)
    np.testing.assert_allclose(first["w"], [-0.1 - 0.1, -0.1 + 0.2], rtol=1e-5)
    _, second = of_one(tmp_path, [[1.0], [2.0]], b1=0.5, b2=0.75)
    # m = (0.5 * 0.5 + 0.5 * 2) / (1 - 0.25), v = (0.75 * 0.25 + 0.25 * 4) / (1 - 0.5625)
    assert second == pytest.approx([-0.1 * (1.25 / 0.75) / np.sqrt(1.1875 / 0.4375)], rel=1e-5)
    (small,) = of_one(tmp_path, [[1.0]], options={"eps": 1.0})
    assert small == pytest.approx([-0.1 * 1.0 / (1.0 + 1.0)], rel=1e-6)


def test_lion_by_hand(tmp_path: Path) -> None:
    """Step along sign(b1 m + (1 - b1) g), and only then m = b2 m + (1 - b2) g."""
    found = of_one(tmp_path, [[2.0, -3.0, 0.0], [-1.0, 1.0, 0.0]], name="lion", b1=0.5, b2=0.5)
    # m = (1, -1.5, 0); then 0.5 * 1 - 0.5 * 1 = 0, and -0.75 + 0.5 < 0
    np.testing.assert_allclose(found, [[-0.1, 0.1, 0.0], [0.0, 0.1, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "second"),
    [
        ({}, [-0.1, 0.2]),
        ({"momentum": 0.5}, [-0.1 * 2, 0.2 - 0.1]),  # 1 + 0.5 * 2, -2 + 0.5 * 2
        ({"momentum": 0.5, "nesterov": True}, [-0.1 * 2, 0.25]),  # 1 + 0.5 * 2, -2 + 0.5 * -1
    ],
    ids=str,
)
def test_sgd_by_hand(tmp_path: Path, options: dict[str, Any], second: list[float]) -> None:
    first, found = of_one(tmp_path, [[2.0, 2.0], [1.0, -2.0]], name="sgd", options=options)
    assert first == pytest.approx([-0.2 * (1 + 0.5 * ("nesterov" in options))] * 2)
    assert found == pytest.approx(second)


def adafactor(gradients: Sequence[np.ndarray], decay_rate: float, clip: float) -> list[np.ndarray]:
    """Algorithm 4 of arXiv 1804.04235 without relative steps, float64: sums of rows and columns of a matrix."""
    rows, columns, found = 0.0, 0.0, []
    for t, gradient in enumerate(gradients, start=1):
        b2 = 1 - t**-decay_rate
        square = gradient.astype(np.float64) ** 2 + 1e-30
        rows = b2 * rows + (1 - b2) * square.sum(axis=1)
        columns = b2 * columns + (1 - b2) * square.sum(axis=0)
        step = gradient / np.sqrt(np.outer(rows, columns) / np.sum(rows))
        found.append(step / max(1.0, np.sqrt(np.mean(step**2)) / clip))
    return found


@pytest.mark.parametrize("shape", [(130, 160), (160, 130)])
def test_adafactor_is_the_papers(tmp_path: Path, shape: tuple[int, int]) -> None:
    gradients = [RNG.normal(size=shape) * 10.0 ** RNG.uniform(-3, 0, shape) for _ in range(3)]
    found = steps(
        tmp_path,
        {"w": np.zeros(shape)},
        [{"w": gradient} for gradient in gradients],
        name="adafactor",
        options={"decay_rate": 0.7, "clip_rms": 0.6},
    )
    for step, expected in zip(found, adafactor(gradients, 0.7, 0.6), strict=True):
        np.testing.assert_allclose(step["w"], -0.1 * expected, rtol=2e-4, atol=1e-7)
    rms = np.sqrt(np.mean(found[0]["w"] ** 2))
    assert rms == pytest.approx(0.1 * 0.6, rel=1e-5)  # it was clipped


def test_adafactor_keeps_the_whole_second_moment_of_what_is_small(tmp_path: Path) -> None:
    found = of_one(tmp_path, [[2.0, -1.0], [1.0, 1.0]], name="adafactor", options={"clip_rms": 10.0})
    kept = 1 - 2**-0.8
    second = [-0.1 / np.sqrt(kept * 4 + 1 - kept), -0.1 / np.sqrt(kept + 1 - kept)]
    np.testing.assert_allclose(found, [[-0.1, 0.1], second], rtol=1e-5)


# --- Muon ------------------------------------------------------------------------------------------------------------

MATRICES = {
    "layers.0.attn.q_proj.w": ((32, 4, 16), lambda x: x.reshape(32, 64)),
    "layers.0.attn.o_proj.w": ((4, 16, 24), lambda x: x.reshape(64, 24)),
    "layers.0.mlp.up_proj.kernel": ((32, 48), lambda x: x),
    "layers.0.attn.q_proj.w_lora_a": ((32, 2), lambda x: x),
    "layers.0.attn.q_proj.w_lora_b": ((2, 4, 16), lambda x: x.reshape(2, 64)),
}
NO_MATRICES = {
    "embedder.input_embedding": (40, 32),
    "lm_head.w": (32, 40),
    "layers.0.input_layernorm.w": (32,),
    "layers.0.attn.q_bias": (64,),
}


def newton_schulz(gradient: np.ndarray) -> np.ndarray:
    """Jordan's quintic iteration, five times, float64."""
    x = gradient / np.linalg.norm(gradient)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.full
def test_muon_makes_a_matrix_orthogonal_and_leaves_the_rest_to_adam(tmp_path: Path) -> None:
    shapes = {name: shape for name, (shape, _) in MATRICES.items()} | NO_MATRICES
    gradients = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    (found,) = steps(tmp_path, {n: np.zeros(s) for n, s in shapes.items()}, [gradients], name="muon")
    for name, (_, flat) in MATRICES.items():
        step, gradient = flat(-found[name] / 0.1), flat(gradients[name])
        longer = max(step.shape)
        np.testing.assert_allclose(step, 0.2 * np.sqrt(longer) * newton_schulz(gradient), atol=2e-4)
        singular = np.linalg.svd(step / (0.2 * np.sqrt(longer)), compute_uv=False)
        assert 0.6 < singular.min() <= singular.max() < 1.3, name  # Jordan: between 0.7 and 1.2, nearly
        # A matrix of m x n, m <= n, with singular values s has the RMS sqrt(sum s^2 / mn) = sqrt(mean s^2 / n).
        assert np.sqrt(np.mean(step**2)) == pytest.approx(0.2 * np.sqrt(np.mean(singular**2)), rel=1e-5)
    for name in NO_MATRICES:
        np.testing.assert_allclose(found[name], -0.1 * np.sign(gradients[name]), rtol=1e-4)


def test_every_expert_has_a_matrix_of_its_own(tmp_path: Path) -> None:
    name, gradient = "layers.0.mlp.gate_proj", RNG.normal(size=(3, 16, 24))
    (found,) = steps(tmp_path, {name: np.zeros((3, 16, 24))}, [{name: gradient}], name="muon", options={"rms": 0.5})
    for expert in range(3):
        expected = -0.1 * 0.5 * np.sqrt(24) * newton_schulz(gradient[expert])
        np.testing.assert_allclose(found[name][expert], expected, atol=1e-4)


def test_muons_momentum_is_nesterovs(tmp_path: Path) -> None:
    """m = b m + (1 - b) g without bias matters not: the norm is divided out; step along b m + (1 - b) g."""
    name, gradients = "layers.0.mlp.up_proj.kernel", RNG.normal(size=(2, 16, 24))
    found = steps(
        tmp_path, {name: np.zeros((16, 24))}, [{name: g} for g in gradients], name="muon", options={"beta": 0.5}
    )
    momentum = 0.25 * gradients[0] + 0.5 * gradients[1]
    along = 0.5 * momentum / (1 - 0.5**3) + 0.5 * gradients[1] / (1 - 0.5**2)  # corrected as Nesterov-Adam is
    np.testing.assert_allclose(found[1][name], -0.1 * 0.2 * np.sqrt(24) * newton_schulz(along), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("q_einsum.w", (4, 32, 16), ((1,), (0, 2))),
        ("kv_einsum.w", (2, 4, 32, 16), ((2,), (1, 3))),
        ("qkv_einsum.w", (3, 4, 32, 16), ((2,), (1, 3))),
        ("attn_vec_einsum.w", (4, 16, 32), ((0, 1), (2,))),
        ("attn_vec_einsum.w_lora_a", (4, 16, 2), ((0, 1), (2,))),
        ("q_einsum.w_lora_b", (2, 4, 16), ((0,), (1, 2))),
    ],
)
def test_gemmas_heads_are_columns_of_what_makes_them(name: str, shape: tuple[int, ...], axes: Any) -> None:
    """Tunix has 'BTD,NDH->BTNH', 'BTD,[2]KDH' and 'BTNH,NHD->BTD': D are the inputs of all but the last."""
    found = matrix_axes(f"layers.0.attn.{name}", shape)
    assert found is not None
    assert tuple(found) == axes


def test_sides_of_matrices() -> None:
    for name, (shape, flat) in MATRICES.items():
        assert longer_side(shape, matrix_axes(name, shape)) == max(flat(np.zeros(shape)).shape)
    assert [matrix_axes(name, shape) for name, shape in NO_MATRICES.items()] == [None] * 4
    assert longer_side((40, 32), None) == 1


# --- eight bits ------------------------------------------------------------------------------------------------------


def test_adamw_8bit_is_adamw_with_a_compact_state(tmp_path: Path) -> None:
    params = {"w": RNG.normal(size=(4, 32))}
    gradients = [{"w": RNG.normal(size=(4, 32))} for _ in range(3)]
    by_name = steps(tmp_path, params, gradients, name="adamw_8bit")
    by_state = steps(tmp_path, params, gradients, name="adamw", state="compact")
    full = steps(tmp_path, params, gradients, name="adamw")
    assert [step["w"].tobytes() for step in by_name] == [step["w"].tobytes() for step in by_state]
    np.testing.assert_allclose(by_name[0]["w"], full[0]["w"], rtol=1e-6)
    assert 1e-4 < np.abs(by_name[2]["w"] - full[2]["w"]).max() < 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["muon", "lion", *(pytest.param(other, marks=pytest.mark.slow) for other in ("adamw", "adafactor", "sgd"))]
)
def test_every_optimizer_goes_in_eight_bits(tmp_path: Path, name: str) -> None:
    params = {"layers.0.w": RNG.normal(size=(16, 24)), "norm": np.ones(16)}
    gradients = [{k: RNG.normal(size=v.shape) for k, v in params.items()} for _ in range(2)]
    options = {"momentum": 0.9} if name == "sgd" else {}
    full = steps(tmp_path, params, gradients, name=name, options=options)
    compact = steps(tmp_path, params, gradients, name=name, options=options, state="compact")
    for key in params:
        np.testing.assert_allclose(compact[0][key], full[0][key], rtol=1e-5, atol=1e-7)
        left, right = full[1][key].ravel(), compact[1][key].ravel()
        assert left @ right / np.linalg.norm(left) / np.linalg.norm(right) > 0.97, key


# --- names, options, functions of the user ---------------------------------------------------------------------------


PARAMS = {"layers.0.q_proj.w": np.ones(2), "layers.0.norm.w": np.ones(2), "embedder.w": np.ones(2)}
OWN = """
import optax

def half(learning_rate, momentum=0.0):
    return optax.chain(optax.scale(0.5), optax.sgd(learning_rate, momentum or None))

def broken(learning_rate):
    return 1 / 0

def nothing(learning_rate):
    return learning_rate
"""


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path}/own.py"
    gradients = [{name: np.ones(2) for name in PARAMS}] * 2
    first, second = steps(tmp_path, PARAMS, gradients, name=f"{own}:half", options={"momentum": 0.5})
    np.testing.assert_allclose([first["embedder.w"], second["embedder.w"]], [[-0.05] * 2, [-0.075] * 2], rtol=1e-6)


def test_what_no_optimizer_or_schedule_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    for given, told in rows(MISTAKES):
        config = make_config(tmp_path, yaml.safe_load(f"{{{given}}}"))
        with pytest.raises(ConfigError) as caught:
            build_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.updates), PARAMS)
        compare(MISTAKES, given, told, str(caught.value).replace(str(tmp_path), "HERE"))


# --- the learning rate -----------------------------------------------------------------------------------------------


def rates(directory: Path, max_steps: int, iterations: int, **optimizer: Any) -> list[float]:
    tree = {"run": {"max_steps": max_steps}, "algorithm": {"iterations": iterations}, "optimizer": optimizer}
    config = make_config(directory, tree)
    schedule = learning_rate_schedule(config.optimizer, config.updates)
    return [float(np.asarray(schedule(update))) for update in range(max_steps * iterations + 1)]


def test_schedules_by_hand(tmp_path: Path) -> None:
    peak = {"learning_rate": 8.0}
    assert rates(tmp_path, 3, 1, **peak) == [8, 8, 8, 8]
    assert rates(tmp_path, 4, 1, **peak, warmup_steps=4) == [0, 2, 4, 6, 8]
    assert rates(tmp_path, 4, 1, **peak, schedule="linear") == [8, 6, 4, 2, 0]
    assert rates(tmp_path, 4, 1, **peak, schedule="linear", warmup_steps=2) == [0, 4, 8, 4, 0]
    assert rates(tmp_path, 2, 2, **peak, schedule="linear", warmup_steps=2) == [0, 4, 8, 4, 0]  # counts updates
    cosine = [8, 4 * (1 + np.sqrt(0.5)), 4, 4 * (1 - np.sqrt(0.5)), 0]
    np.testing.assert_allclose(rates(tmp_path, 4, 1, **peak, schedule="cosine"), cosine, atol=1e-6)


def test_schedules_count_the_updates_of_mini_batches(tmp_path: Path) -> None:
    """4 prompts in two mini-batches, twice: two steps have 8 updates."""
    algorithm = {"iterations": 2, "mini_batch_prompts": 2}
    optimizer = {"learning_rate": 8.0, "schedule": "linear"}
    config = make_config(tmp_path, {"run": {"max_steps": 2}, "algorithm": algorithm, "optimizer": optimizer})
    schedule = learning_rate_schedule(config.optimizer, config.updates)
    assert [float(np.asarray(schedule(update))) for update in range(9)] == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_schedule_may_be_that_of_a_longer_run(tmp_path: Path) -> None:
    """Two steps of two updates make the first four of five."""
    linear = {"learning_rate": 10.0, "schedule": "linear", "warmup_steps": 1, "schedule_steps": 5}
    assert rates(tmp_path, 2, 2, **linear) == [0, 10, 7.5, 5, 2.5]


def test_warm_up_stable_decay_by_hand(tmp_path: Path) -> None:
    wsd = {"learning_rate": 8.0, "schedule": "wsd"}
    assert rates(tmp_path, 8, 1, **wsd, warmup_steps=2, decay_steps=4) == [0, 4, 8, 8, 8, 6, 4, 2, 0]
    assert rates(tmp_path, 4, 2, **wsd, warmup_steps=2, decay_steps=4) == [0, 4, 8, 8, 8, 6, 4, 2, 0]
    assert rates(tmp_path, 4, 1, **wsd, decay_steps=2) == [8, 8, 8, 4, 0]
    assert rates(tmp_path, 3, 1, **wsd)[:3] == [8, 8, 8]
