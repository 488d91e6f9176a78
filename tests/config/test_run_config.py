"""The whole config: what follows from settings, which of them exclude each other, and how all are written out."""

from pathlib import Path

import pytest
import yaml

from tests.config.asking import SHIPPED, leaves, message
from tpu_grpo.config import RunConfig, load_config


def test_sizes_that_follow_from_settings() -> None:
    config = load_config(
        None,
        [
            "data.prompts_per_step=6",
            "algorithm.group_size=5",
            "data.max_prompt_tokens=100",
            "rollout.max_new_tokens=28",
        ],
    )
    assert (config.batch_rows, config.context_tokens) == (30, 128)


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
    lengths = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28"]
    sizes = ["data.prompts_per_step=6", "algorithm.group_size=5", f"algorithm.micro_batch_prompts={micro}"]
    config = load_config(None, [*lengths, *sizes])
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
    lengths = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28", "algorithm.iterations=2"]
    sizes = ["data.prompts_per_step=6", "algorithm.group_size=5", f"algorithm.micro_batch_prompts={micro}"]
    config = load_config(None, [*lengths, *sizes, f"algorithm.mini_batch_prompts={mini}"])
    assert (config.micro_batch_rows(1), config.micro_batches(1), config.updates_per_step) == (rows, passes, updates)
    assert config.update_rows == (30 if mini == "null" else 5 * int(mini))


def test_mini_batches_are_of_one_size() -> None:
    prompts = "data.prompts_per_step=12"
    assert message(prompts, "algorithm.mini_batch_prompts=5") == (
        "algorithm.mini_batch_prompts must divide data.prompts_per_step=12, so that all updates are of one size, got "
        "5; take e.g. 4"
    )
    assert message(prompts, "algorithm.mini_batch_prompts=24").endswith("got 24; take e.g. 12")
    assert message(prompts, "algorithm.mini_batch_prompts=4", "algorithm.micro_batch_prompts=6") == (
        "algorithm.micro_batch_prompts must be <= algorithm.mini_batch_prompts=4, got 6; lower it"
    )


def test_run_dir_follows_the_name_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(None, ["run.name=x"]).run_dir == Path("runs/x")
    assert load_config(None, ["run.name=x", "run.dir=/out/y"]).run_dir == Path("/out/y")
    assert load_config(None, ["run.dir=~/y"]).run_dir == Path("/home/someone/y")


def test_rows_hold_the_longest_sequence() -> None:
    assert message("data.prompts_per_step=12", "algorithm.micro_batch_prompts=13") == (
        "algorithm.micro_batch_prompts must be <= data.prompts_per_step=12, got 13; lower it"
    )
    lengths = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28"]
    assert message(*lengths, "algorithm.row_tokens=127") == (
        "algorithm.row_tokens must be >= data.max_prompt_tokens + rollout.max_new_tokens = 128, got 127; raise it, or "
        "leave it out"
    )
    assert load_config(None, lengths).row_tokens == 128


def test_longer_rows_make_fewer_of_them() -> None:
    """Rows of 300 tokens hold two completions of at most 128: 10 prompts of 3 completions need 15, four of them 6."""
    sizes = ["data.prompts_per_step=10", "algorithm.group_size=3", "algorithm.micro_batch_prompts=4"]
    lengths = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28", "algorithm.row_tokens=300"]
    config = load_config(None, [*sizes, *lengths])
    assert (config.step_rows, config.micro_batch_rows(1), config.micro_batches(1)) == (15, 6, 3)


@pytest.mark.parametrize(
    ("page_size", "needed"),
    [
        (1, 142),  # 100 + 40 + 2 spare
        (16, 144),  # nine pages hold 144, eight only 128
        (71, 142),  # two pages exactly
        (128, 256),
    ],
)
def test_the_cache_holds_one_whole_request(page_size: int, needed: int) -> None:
    sizes = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=40", f"rollout.page_size={page_size}"]
    assert message(*sizes, f"rollout.kv_tokens={needed - 1}") == (
        f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens=100 + "
        f"rollout.max_new_tokens=40, 2 spare, and 7 beside a prompt, whole pages of {page_size}), got {needed - 1}; "
        "raise it or shorten prompts or completions"
    )
    assert load_config(None, [*sizes, f"rollout.kv_tokens={needed}"]).rollout.kv_tokens == needed


def test_the_cache_takes_the_longest_prompt() -> None:
    sizes = ["data.max_prompt_tokens=12", "rollout.max_new_tokens=4"]
    assert "must hold one whole request: >= 19 tokens (data.max_prompt_tokens=12 + rollout.max_new_tokens=4" in message(
        *sizes, "rollout.kv_tokens=18"
    )
    assert load_config(None, [*sizes, "rollout.kv_tokens=19"]).rollout.kv_tokens == 19


def test_the_cache_takes_the_longest_prompt_of_a_conversation() -> None:
    """The last turn of a conversation of 16 tokens begins behind 15 of them, and 7 are wanted beside a prompt."""
    sizes = ["data.max_prompt_tokens=12", "rollout.max_new_tokens=4", "environment.name=guessing"]
    assert "must hold one whole request: >= 22 tokens" in message(*sizes, "rollout.kv_tokens=21")
    assert load_config(None, [*sizes, "rollout.kv_tokens=22"]).rollout.kv_tokens == 22


def test_a_timeline_is_of_steps_that_come() -> None:
    steps = "logging.profile_steps=[3, 4, 10]"
    assert message("run.max_steps=4", steps) == (
        "logging.profile_steps must be at most run.max_steps=4, got [10]; drop them, or raise run.max_steps"
    )
    assert load_config(None, ["run.max_steps=10", steps]).logging.profile_steps == (3, 4, 10)


def test_releasing_memory_needs_shared_devices() -> None:
    assert message("rollout.release_during_update=true", "meshes.layout=split") == (
        "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing on "
        "the trainer's devices: leave it false"
    )
    assert load_config(None, ["rollout.release_during_update=true"]).rollout.release_during_update


def test_training_does_not_sample_greedily() -> None:
    assert message("rollout.temperature=0") == (
        "rollout.temperature must be > 0 for training, got 0.0; greedy completions of a group are all the same, so "
        "every advantage is zero. Try 1.0"
    )


def test_a_reward_is_listed_once() -> None:
    assert message("rewards=[{name: gsm8k}, {name: format}, {name: gsm8k, weight: 2}]") == (
        "rewards must have names of their own in the metrics, got ['gsm8k'] twice; give one of them a label"
    )


def test_adapters_and_trained_layers_exclude_each_other() -> None:
    assert "model.train_layers=0-1 and model.lora.rank=4 exclude each other" in message(
        "model.train_layers=0-1", "model.lora.rank=4"
    )


def test_bfloat16_parameters_keep_what_a_step_would_lose() -> None:
    assert message("model.dtype=bfloat16", "model.param_dtype=bfloat16") == (
        "model.param_dtype=bfloat16 needs optimizer.state=compact, got full; a step of 1e-6 is far below half a bit of "
        "a bfloat16 weight and would be lost: set it, or use model.param_dtype=float32"
    )
    assert message("model.param_dtype=bfloat16", "optimizer.state=compact") == (
        "model.param_dtype=bfloat16 needs model.dtype=bfloat16, got float32; use model.param_dtype=float32"
    )


def test_decay_steps_are_of_one_schedule() -> None:
    assert message("optimizer.decay_steps=5") == (
        "optimizer.decay_steps=5 needs optimizer.schedule=wsd, got constant; set it, or leave decay_steps at 0"
    )


@pytest.mark.parametrize("compact", ["optimizer.state=compact", "optimizer.name=adamw_8bit"])
def test_bfloat16_parameters_and_a_compact_state_go_together(compact: str) -> None:
    config = load_config(None, ["model.dtype=bfloat16", "model.param_dtype=bfloat16", compact])
    assert config.model.param_dtype == "bfloat16"


@pytest.mark.parametrize("setting", ["layers=0", "path=somewhere"])
def test_settings_of_adapters_need_a_rank(setting: str) -> None:
    assert f"model.lora.{setting} needs model.lora.rank, got none" in message(f"model.lora.{setting}")


def test_an_export_at_the_end_has_what_it_needs() -> None:
    assert "export.kind=adapter needs a model with adapters, got model.lora.rank unset; use" in message(
        "export.kind=adapter"
    )
    best = "export.every=best"
    assert "best needs held-out data, got none; set evaluation.path, or use last" in message(best, "data.path=a.jsonl")
    assert "best needs checkpoint.keep_best=true, got false" in message(best, "checkpoint.keep_best=false")
    for words in ([best], [best, "data.path=a.jsonl", "evaluation.path=b.jsonl"], ["export.every=last"]):
        assert load_config(None, words).export.every in ("best", "last")
    assert load_config(None, ["export.kind=adapter", "model.lora.rank=2"]).export.kind == "adapter"


def test_an_environment_gives_the_reward_unless_others_are_named() -> None:
    assert [spec.name for spec in load_config(None, ["environment.name=calculator"]).rewards] == ["environment"]
    named = load_config(None, ["environment.name=calculator", "rewards=[{name: exact_answer}]"])
    assert [spec.name for spec in named.rewards] == ["exact_answer"]
    assert [spec.name for spec in load_config(None, []).rewards] == ["exact_answer"]


def test_conversations_need_what_tells_turns_apart() -> None:
    on = "environment.name=calculator"
    assert "environment.name needs data.chat_template=true, got false" in message(on, "data.chat_template=false")
    assert "does not go with data.final_assistant=continue" in message(on, "data.final_assistant=continue")
    assert "error_value=-1.0 needs environment.on_error=value, got stop" in message(on, "environment.error_value=-1")
    assert "data.path=builtin:environment needs environment.name, got none" in message("data.path=builtin:environment")
    assert "must name an environment, got" in message("environment.name={}")
    several = load_config(None, ["environment.name={a: calculator, b: mine.py:Game}"]).environment
    assert several.names == {"a": "calculator", "b": "mine.py:Game"}
    assert load_config(None, []).environment.names == {}


def test_the_resolved_yaml_writes_every_setting_out() -> None:
    assert list(leaves(yaml.safe_load(RunConfig().to_yaml()))) == list(leaves(RunConfig().model_dump()))


def test_there_are_shipped_configs() -> None:
    assert {"demo_cpu.yaml", "gsm8k_cpu_check.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert load_config(again).to_yaml() == config.to_yaml()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_named_after_its_file(path: Path) -> None:
    assert load_config(path).run.name == path.stem
