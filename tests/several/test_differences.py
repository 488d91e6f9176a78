"""Any difference between hosts ends all with exit code 3, in time; the message names what differs and the host."""

from pathlib import Path

import pytest

from tests.several.runs import run_hosts, seconds_since_last_stage, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = 60

SETTINGS = [
    ("run.seed=6", "run.seed"),
    ("model.dtype=bfloat16", "model.dtype"),
    ("meshes.trainer={fsdp: 2, tp: 2}", "meshes.trainer.fsdp"),
    ("hosts.check=step", "hosts.check"),
    ("rewards=[{name: rewards.py:ascii_share, weight: 2.0}]", "rewards.0.weight"),
]
"""One setting of each kind; tests/run/test_fingerprints.py compares every setting."""
FILES = [
    ("line:data.jsonl", "data file of data.path"),
    ("line:held.jsonl", "data file of evaluation.path"),
    ("file:rewards.py", "source of reward rewards.py:ascii_share"),
    ("file:model/model.safetensors", "model file model.safetensors"),
    ("file:model/config.json", "model file config.json"),
    ("file:model/tokenizer.json", "model file tokenizer.json"),
    ("file:model/tokenizer_config.json", "model file tokenizer_config.json"),
    ("file:model/added_tokens.json", "model file added_tokens.json"),
]
ENVIRONMENT = [
    ("variable:XLA_FLAGS=--xla_cpu_enable_fast_math=false", "environment variable XLA_FLAGS"),
    ("variable:LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=98304", "environment variable LIBTPU_INIT_ARGS"),
    ("variable:JAX_DEFAULT_MATMUL_PRECISION=bfloat16", "environment variable JAX_DEFAULT_MATMUL_PRECISION"),
    ("variable:NPROC=3", "environment variable NPROC"),
    ("version:flax", "version of flax"),
]


@pytest.mark.parametrize(
    ("fault", "name"),
    [*((f"setting:{text}", f"setting {name}") for text, name in SETTINGS), *FILES, *ENVIRONMENT],
)
def test_what_hosts_are_started_with(files: Path, tmp_path: Path, fault: str, name: str) -> None:
    ended = run_hosts(2, 2, files, settings(tmp_path, evaluation={"path": "held.jsonl"}), fault=fault)
    assert ended.code == 3, ended.errors
    assert ended.seconds < SECONDS
    for host in (0, 1):
        own = ended.of_host(host)
        assert f"{name} differs: host 0 has " in own, own
        assert "; host 1 has " in own
        assert "Traceback" not in own
    assert not (tmp_path / "config.yaml").exists()  # an earlier run's files are as they were


IN_THE_RUN = [
    ("sampled_token", 4, "replica 0, which they share"),
    ("order", 4, "replica 0, which they share"),
    ("dealing", 1, "must deal requests alike"),
    ("schedule", 4, "cache tokens of an engine differs: host 0 has "),
    ("gathered_token", 1, "tokens of step 1 differs: host 0 has "),
    ("prompts", 1, "prompts of step 1 differs: host 0 has "),
    ("sampler_parameter:model.layers.0.mlp.up_proj.weight", 1, "sampler's model.layers.0.mlp.up_proj.wei"),
    ("trainer_parameter:layers.0.attn.q_norm.w", 1, "trainer's layers.0.attn.q_norm.w must be the same"),
    ("reward", 1, "reward odd_on_host_1 must give the same value for the same text on every host, got "),
]


@pytest.mark.parametrize(("fault", "tensor", "message"), IN_THE_RUN)
def test_what_hosts_compute(files: Path, tmp_path: Path, fault: str, tensor: int, message: str) -> None:
    tree = settings(tmp_path, meshes={"sampler": {"tensor": tensor}})
    if fault == "reward":
        fault, tree["rewards"] = "", [{"name": "rewards.py:odd_on_host_1", "workers": 0}]
    ended = run_hosts(2, 2, files, tree, fault=fault)
    assert ended.code == 3, ended.errors
    assert ended.seconds < SECONDS or seconds_since_last_stage(tmp_path) < SECONDS
    for host in (0, 1):
        own = ended.of_host(host)
        assert message in own, own
        assert "host 1" in own
        assert "Traceback" not in own


def test_the_first_launch_that_differs_is_named(files: Path, tmp_path: Path) -> None:
    """Host 1 reads other tokens from launch 3. Launch 4 has begun by then, so the hosts disagree before launch 5."""
    tree = settings(tmp_path, meshes={"sampler": {"tensor": 4}}, rollout={"max_new_tokens": 10, "steps_per_launch": 2})
    ended = run_hosts(2, 2, files, tree, "hosts.check=step", fault="sampled_token")
    assert ended.code == 3, ended.errors
    for host in (0, 1):
        assert "scheduling of launch 5 of replica 0 differs: host 0 has " in ended.of_host(host)
