"""The whole config: what follows from settings, which of them exclude each other, and how all are written out."""

from pathlib import Path

import pytest
import yaml

from tests.config.asking import SHIPPED, leaves, message
from tpu_grpo.config import RunConfig, load_config

LENGTHS = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28"]
SIZES = [*LENGTHS, "data.prompts_per_step=6", "algorithm.group_size=5"]


@pytest.mark.parametrize(
    ("micro", "devices", "rows", "passes"),
    [
        ("6", 1, 30, 1),
        ("2", 1, 10, 3),
        ("2", 4, 12, 3),  # rounded up to fill the mesh
        ("null", 1, 4, 8),  # an eighth of 30 rows
        ("null", 8, 32, 1),  # 512 tokens for each of 8 devices are 32 rows of 128
    ],
)
def test_micro_batches(micro: str, devices: int, rows: int, passes: int) -> None:
    config = load_config(None, [*SIZES, f"algorithm.micro_batch_prompts={micro}"])
    assert (config.batch_rows, config.context_tokens, config.row_tokens) == (30, 128, 128)
    assert (config.micro_batch_rows(devices), config.micro_batches(devices)) == (rows, passes)


@pytest.mark.parametrize(
    ("mini", "micro", "rows", "passes", "updates"),
    [
        ("null", "null", 4, 8, 2),  # an eighth of 30 rows; two iterations
        ("3", "null", 4, 8, 4),  # the same passes: 15 rows are 4 of them, twice
        ("1", "null", 4, 12, 12),
        ("1", "1", 5, 6, 12),
        ("6", "2", 10, 3, 2),
    ],
)
def test_mini_batches(mini: str, micro: str, rows: int, passes: int, updates: int) -> None:
    sizes = ["algorithm.iterations=2", f"algorithm.micro_batch_prompts={micro}", f"algorithm.mini_batch_prompts={mini}"]
    config = load_config(None, [*SIZES, *sizes])
    assert (config.micro_batch_rows(1), config.micro_batches(1), config.updates_per_step) == (rows, passes, updates)
    assert config.update_rows == (30 if mini == "null" else 5 * int(mini))


def test_longer_rows_make_fewer_of_them() -> None:
    """Rows of 300 tokens hold two completions of at most 128: 10 prompts of 3 completions need 15, four of them 6."""
    sizes = ["data.prompts_per_step=10", "algorithm.group_size=3", "algorithm.micro_batch_prompts=4"]
    config = load_config(None, [*sizes, *LENGTHS, "algorithm.row_tokens=300"])
    assert (config.update_rows, config.micro_batch_rows(1), config.micro_batches(1)) == (15, 6, 3)


@pytest.mark.parametrize(
    ("overrides", "run_dir"),
    [(["run.name=x"], "runs/x"), (["run.name=x", "run.dir=/out/y"], "/out/y"), (["run.dir=~/y"], "/home/someone/y")],
)
def test_run_dir_follows_the_name_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], run_dir: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(None, overrides).run_dir == Path(run_dir)


@pytest.mark.parametrize(
    ("prompt", "new", "more", "needed"),
    [
        (100, 40, "rollout.page_size=1", 142),  # 100 + 40 + 2 spare
        (100, 40, "rollout.page_size=16", 144),  # nine pages hold 144, eight only 128
        (100, 40, "rollout.page_size=71", 142),  # two pages exactly
        (100, 40, "rollout.page_size=128", 256),
        (12, 4, "rollout.page_size=1", 19),  # 7 beside the prompt
        (12, 4, "environment.name=guessing", 22),  # the last turn of a conversation of 16 tokens begins behind 15
    ],
)
def test_the_cache_holds_one_whole_request(prompt: int, new: int, more: str, needed: int) -> None:
    sizes = [f"data.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={new}", more]
    page = int(more.rpartition("=")[2]) if "page" in more else 1
    assert message(*sizes, f"rollout.kv_tokens={needed - 1}") == (
        f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens={prompt} + "
        f"rollout.max_new_tokens={new}, 2 spare, and 7 beside a prompt, whole pages of {page}), got {needed - 1}; "
        "raise it or shorten prompts or completions"
    )
    assert load_config(None, [*sizes, f"rollout.kv_tokens={needed}"]).rollout.kv_tokens == needed


BF16 = "model.dtype=bfloat16 model.param_dtype=bfloat16"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "data.prompts_per_step=12 algorithm.mini_batch_prompts=5",
            "algorithm.mini_batch_prompts must divide data.prompts_per_step=12, so that all updates are of one size, "
            "got 5; take e.g. 4",
        ),
        ("data.prompts_per_step=12 algorithm.mini_batch_prompts=24", "of one size, got 24; take e.g. 12"),
        (
            "data.prompts_per_step=12 algorithm.mini_batch_prompts=4 algorithm.micro_batch_prompts=6",
            "algorithm.micro_batch_prompts must be <= algorithm.mini_batch_prompts=4, got 6; lower it",
        ),
        (
            "data.prompts_per_step=12 algorithm.micro_batch_prompts=13",
            "algorithm.micro_batch_prompts must be <= data.prompts_per_step=12, got 13; lower it",
        ),
        (
            f"{' '.join(LENGTHS)} algorithm.row_tokens=127",
            "algorithm.row_tokens must be >= data.max_prompt_tokens + rollout.max_new_tokens = 128, got 127; raise it, "
            "or leave it out",
        ),
        (
            "run.max_steps=4 logging.profile_steps=[3,4,10]",
            "logging.profile_steps must be at most run.max_steps=4, got [10]; drop them, or raise run.max_steps",
        ),
        (
            "logging.histograms_every=10",
            "logging.histograms_every=10 needs logging.tensorboard=true or logging.wandb, got neither; set one",
        ),
        (
            "logging.histograms_every=10 logging.wandb=offline algorithm.name=tunix:grpo",
            "logging.histograms_every=10 needs this package's learner, got algorithm.name=tunix:grpo; leave it 0, or "
            "take another algorithm.name",
        ),
        (
            "rollout.release_during_update=true meshes.layout=split",
            "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing "
            "on the trainer's devices: leave it false",
        ),
        (
            "meshes.sampler.hosts=1",
            "meshes.sampler.hosts=1 needs meshes.layout=split, got shared, with which all hosts sample; set it, or "
            "leave meshes.sampler.hosts out",
        ),
        (
            "rollout.temperature=0",
            "rollout.temperature must be > 0 for training, got 0.0; greedy completions of a group are all the same, so "
            "every advantage is zero. Try 1.0",
        ),
        (
            "rewards=[{name:~gsm8k},{name:~format},{name:~gsm8k,weight:~2}]",
            "rewards must have names of their own in the metrics, got ['gsm8k'] twice; give one of them a label",
        ),
        ("hosts.index=1", "hosts.index must be below hosts.count=1, got 1; indices start at 0"),
        (
            "model.train_layers=0-1 model.lora.rank=4",
            "model.train_layers=0-1 and model.lora.rank=4 exclude each other; for adapters in some layers use "
            "model.lora.layers",
        ),
        ("model.lora.layers=0", "model.lora.layers=0 needs model.lora.rank, got none; set it, e.g. to 16"),
        ("model.lora.path=somewhere", "model.lora.path=somewhere needs model.lora.rank, got none; set it"),
        (
            BF16,
            "model.param_dtype=bfloat16 needs optimizer.state=compact, got full; a step of 1e-6 is far below half a "
            "bit of a bfloat16 weight and would be lost: set it, or use model.param_dtype=float32",
        ),
        (
            "model.param_dtype=bfloat16 optimizer.state=compact",
            "model.param_dtype=bfloat16 needs model.dtype=bfloat16, got float32; use model.param_dtype=float32",
        ),
        (
            "optimizer.decay_steps=5",
            "optimizer.decay_steps=5 needs optimizer.schedule=wsd, got constant; set it, or leave decay_steps at 0",
        ),
        ("export.kind=adapter", "export.kind=adapter needs a model with adapters, got model.lora.rank unset; use"),
        (
            "export.every=best data.path=a.jsonl",
            "export.every=best needs held-out data, got none; set evaluation.path, or use last",
        ),
        (
            "export.every=best checkpoint.keep_best=false",
            "export.every=best needs checkpoint.keep_best=true, got false",
        ),
        (
            "environment.name=calculator data.chat_template=false",
            "environment.name needs data.chat_template=true, got false",
        ),
        (
            "environment.name=calculator environment.error_value=-1",
            "environment.error_value=-1.0 needs environment.on_error=value, got stop",
        ),
        ("data.path=builtin:environment", "data.path=builtin:environment needs environment.name, got none"),
    ],
)
def test_settings_that_do_not_go_together(overrides: str, said: str) -> None:
    assert said in message(*(word.replace("~", " ") for word in overrides.split(" ")))


@pytest.mark.parametrize(
    "overrides",
    [
        "run.max_steps=10 logging.profile_steps=[3,4,10]",
        "rollout.release_during_update=true",
        f"{BF16} optimizer.state=compact",
        f"{BF16} optimizer.name=adamw_8bit",
        "export.every=best",
        "export.every=best data.path=a.jsonl evaluation.path=b.jsonl",
        "export.every=last data.path=a.jsonl",
        "export.kind=adapter model.lora.rank=2",
    ],
)
def test_settings_that_do(overrides: str) -> None:
    assert load_config(None, overrides.split()) != RunConfig()


def test_an_environment_gives_the_reward_unless_others_are_named() -> None:
    assert [spec.name for spec in load_config(None, ["environment.name=calculator"]).rewards] == ["environment"]
    named = load_config(None, ["environment.name=calculator", "rewards=[{name: exact_answer}]"])
    assert [spec.name for spec in named.rewards] == ["exact_answer"]


def test_environments_by_name() -> None:
    several = load_config(None, ["environment.name={a: calculator, b: mine.py:Game}"]).environment
    assert several.names == {"a": "calculator", "b": "mine.py:Game"}
    assert RunConfig().environment.names == {}


def test_the_resolved_yaml_writes_every_setting_out() -> None:
    assert list(leaves(yaml.safe_load(RunConfig().to_yaml()))) == list(leaves(RunConfig().model_dump(mode="json")))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert load_config(again).to_yaml() == config.to_yaml()


def test_there_are_shipped_configs() -> None:
    assert {"demo_cpu.yaml", "gsm8k_cpu_check.yaml"} <= {path.name for path in SHIPPED}
