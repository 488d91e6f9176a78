"""Settings: what they default to, and what one alone cannot be."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tpu_grpo.config import RunConfig, load_config, settings

DEFAULTS = """
run.name=run run.dir=unset run.seed=0 model.path=builtin:addition model.dtype=float32 model.param_dtype=float32
model.attention=auto rollout.attention=auto rollout.temperature=1.0 rollout.max_new_tokens=256
rollout.batch_paddings=unset rollout.steps_per_launch=auto rollout.kv_dtype=auto rollout.weights_dtype=auto
rollout.release_during_update=false
rewards=['exact_answer'] rewards[i].weight=1.0 rewards[i].options={}
algorithm.name=grpo algorithm.options={} algorithm.advantage=unset algorithm.loss_aggregation=unset
algorithm.group_size=8 algorithm.beta=0.0 algorithm.iterations=1 algorithm.old_policy=rollout
optimizer.name=adamw optimizer.options={} optimizer.state=full optimizer.learning_rate=1.0e-06
optimizer.schedule=constant optimizer.decay_steps=0 optimizer.b1=0.9 optimizer.b2=0.95
meshes.layout=shared meshes.trainer.fsdp=unset meshes.trainer.tp=1 meshes.sampler.hosts=unset
meshes.sampler.tensor=unset hosts.coordinator=unset hosts.count=1 hosts.index=0
hosts.check=rollout hosts.start_timeout_seconds=300.0 hosts.lost_timeout_seconds=40.0 checkpoint.every=0
checkpoint.resume=auto evaluation.every=0 logging.wandb=off logging.profile_steps=[]
"""


def test_defaults() -> None:
    assert load_config(None) == RunConfig()
    listed = {name: default.strip("'") for name, _, default, _ in settings()}
    stated = [word.partition("=")[::2] for word in DEFAULTS.split()]
    assert [(name, listed[name]) for name, _ in stated] == stated


def test_a_config_is_frozen() -> None:
    config = RunConfig()
    for section, key in ((config, "run"), (config.run, "seed"), (config.meshes.trainer, "tp")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)


@pytest.mark.parametrize(
    ("overrides", "compact"),
    [
        ([], False),
        (["optimizer.state=compact"], True),
        (["optimizer.name=adamw_8bit"], True),
        (["optimizer.name=lion", "optimizer.state=compact"], True),
    ],
)
def test_a_compact_state_is_asked_for_by_the_state_or_by_the_name(overrides: list[str], compact: bool) -> None:
    assert load_config(None, overrides).optimizer.compact == compact


def test_a_single_layer_needs_no_quotes(tmp_path: Path) -> None:
    config = load_config(None, ["model.lora.rank=4", "model.lora.layers=3"])
    assert config.model.lora.layers == "3"
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config
