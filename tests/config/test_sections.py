"""Settings: what they default to, and what one alone cannot be."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.config.asking import message
from tpu_grpo.config import RunConfig, load_config, settings

TAKES = "`--help all` lists what every setting takes"
DEFAULTS = """
run.name=run run.dir=unset run.seed=0 model.path=builtin:addition model.dtype=float32 model.param_dtype=float32
model.attention=auto rollout.attention=auto rollout.temperature=1.0 rollout.max_new_tokens=256
rollout.batch_paddings=unset rollout.steps_per_launch=auto rollout.kv_dtype=auto rollout.release_during_update=false
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
    ("override", "expected"),
    [
        ("run.seed=-1", "run.seed must be greater than or equal to 0, got -1; `--help run.seed` says more"),
        ("run.seed=4294967296", "run.seed must be less than 4294967296, got 4294967296; `--help run.seed` says more"),
        (
            "run.dir=gs://b/run",
            "run.dir must be a directory, got the URL gs://b/run; mount the bucket, and name a directory there",
        ),
        (
            "run.max_steps=1.5",
            "run.max_steps must be a valid integer, got 1.5; `--help run.max_steps` says more",
        ),
        (
            "run.max_steps=many",
            "run.max_steps must be a valid integer, got 'many'; `--help run.max_steps` says more",
        ),
        ("run.max_steps=true", f"run.max_steps must not be a switch, got true; {TAKES}"),
        ("optimizer.b1=false", f"optimizer.b1 must not be a switch, got false; {TAKES}"),
        (
            "model.dtype=bf16",
            "model.dtype must be 'float32' or 'bfloat16', got 'bf16'; write model.dtype=bfloat16",
        ),
        (
            "optimizer.learning_rate=.nan",
            "optimizer.learning_rate must be a finite number, got nan; `--help optimizer.learning_rate` says more",
        ),
        ("optimizer.b2=1", "optimizer.b2 must be less than 1, got 1; `--help optimizer.b2` says more"),
        (
            "rollout.top_k=2147483648",
            "rollout.top_k must be less than 2147483648, got 2147483648; `--help rollout.top_k` says more",
        ),
        ("rollout.top_p=0", "rollout.top_p must be greater than 0, got 0; `--help rollout.top_p` says more"),
        (
            "logging.profile_steps=[3, 0]",
            "logging.profile_steps.1 must be greater than or equal to 1, got 0; "
            "`--help logging.profile_steps` says more",
        ),
        (
            "model.lora.targets=(q",
            "model.lora.targets must be a regular expression, got '(q' (missing ), unterminated subpattern at position "
            "0); an example: attn.(q|v)_proj",
        ),
        (
            "data.sources=[{path: x, weight: -1}]",
            "data.sources.0.weight must be greater than 0, got -1; `--help data.sources[i].weight` says more",
        ),
        ("meshes.trainer=[]", "meshes.trainer must be a section, got []; known in meshes.trainer: fsdp, tp"),
        (
            "evaluation.rewards=[gsm8k]",
            "evaluation.rewards.0 must be a section, got 'gsm8k'; write {name: gsm8k}",
        ),
        (
            "rewards=[{weight: 1}]",
            "rewards.0.name: field required, got {'weight': 1}; `--help rewards[i].name` says more",
        ),
        (
            "rewards=[{name: gsm8k, weight: {-1: 2}}]",
            "rewards.0.weight must be a number or a schedule {step: factor} of steps >= 0, got {-1: 2.0}",
        ),
        (
            "rollout.batch_paddings=[]",
            "rollout.batch_paddings must name a batch size, got []; leave it unset for powers of 2",
        ),
        (
            f"evaluation.path={'a' * 5000}",
            "evaluation.path must be a path that files can have, of at most 255 bytes in each part and 4095 in all, "
            f"got {'a' * 200}; correct it",
        ),
        (
            r'data.system_prompt="a\0b"',
            "data.system_prompt must be text without NUL and halves of surrogate pairs, got 'a\\x00b'; correct it",
        ),
        (
            "rollout.steps_per_launch=0",
            "rollout.steps_per_launch must be auto or a whole number from 1 on, below 2**31, got 0; `--help all` says "
            "what it means",
        ),
        ("run.name=7", "run.name must be text, got 7; put a text in quotes of its own: run.name='\"...\"'"),
        ("environment.name={}", "environment.name must name an environment, got {}; leave it unset for none"),
        (
            "data.path=[a.jsonl,https://me:word@example.org/d.jsonl]",
            "data.path must not hold a password, which logs and config.yaml would show, got one for "
            "example.org/d.jsonl; name a variable of the environment in its place: "
            "https://me:$MY_PASSWORD@example.org/train.jsonl",
        ),
        ("data.path=", "data.path must name a source, got ''; builtin:addition is the default"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_remedy(override: str, expected: str) -> None:
    assert message(override) == expected


@pytest.mark.parametrize("name", ["a b", "../x", ".hidden", "a/b", ""])
def test_a_run_name_is_a_plain_file_name(name: str) -> None:
    assert message(f'run.name="{name}"').startswith("run.name: string should match pattern")


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
