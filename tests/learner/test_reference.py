"""A reference that is made anew: whose arrays are its own, with adapters and without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.learner.test_trained import LORA, MODULES
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored
from tpu_grpo.learner.parameters import by_name, copy_values, own_copy
from tpu_grpo.models.lora import apply_lora


def values(model: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in by_name(nnx.state(model, nnx.Param)).items()}


def test_only_what_is_trained_is_copied() -> None:
    policy = make_model(make_mesh(1))
    trained = {name for name in values(policy) if name.startswith("layers.1.")}
    reference = own_copy(policy, trained)
    before = values(reference)
    moved = nnx.state(policy, nnx.Param)
    nnx.update(
        policy, nnx.from_flat_state([(p, leaf.replace(leaf[...] + 1.0)) for p, leaf in nnx.to_flat_state(moved)])
    )
    copy_values(reference, policy, trained)
    for name, value in values(reference).items():
        np.testing.assert_array_equal(value, before[name] + (1.0 if name in trained else 0.0))
    held, own = by_name(nnx.state(policy, nnx.Param)), by_name(nnx.state(reference, nnx.Param))
    assert not any(held[name] is own[name] for name in own)


@pytest.mark.slow  # a learner with adapters is compiled
def test_with_adapters_the_reference_gets_adapters_of_its_own(tmp_path: Path) -> None:
    algorithm = {"beta": 0.1, "reference_reset_every": 1}
    config = make_config(tmp_path, {"model": {"lora": LORA.model_dump()}, "algorithm": algorithm})
    mesh, base = make_mesh(), make_model(make_mesh())
    policy = apply_lora(base, MODULES, LORA, seed=0)
    learner = make_learner(config, mesh, model=policy, reference=base)
    reference = learner._parts.reference
    assert reference is not None
    for step in (1, 2):
        metrics = learner.update(make_scored(base, config, step)).metrics
        assert metrics["update/kl"] == pytest.approx(0.0, abs=1e-6)  # after step 1 it was made anew
        adapters = by_name(nnx.state(reference, nnx.LoRAParam))
        for name, leaf in learner._updater.trained.items():
            np.testing.assert_array_equal(np.asarray(adapters[name]), np.asarray(leaf))
            assert adapters[name] is not leaf
    learner.save(2)
    learner.close()
    assert {path.name for path in (config.run_dir / "checkpoints" / "2").iterdir()} > {"reference_params"}
