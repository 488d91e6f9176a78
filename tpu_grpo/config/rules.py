"""What must hold between settings of different sections; each rule raises ValueError with rule, value and remedy."""

from typing import TYPE_CHECKING

from tpu_grpo.config.data import BUILTIN_TASK, NO_DATA, ReadingSection, check_rewards

if TYPE_CHECKING:
    from tpu_grpo.config.run_config import RunConfig

CACHE_MARGIN_TOKENS = 2
"""sglang-jax cuts a completion short when the cache has fewer tokens than this beside it."""
PROMPT_MARGIN_TOKENS = 7
"""sglang-jax takes another prompt in the place of one beside which the cache has fewer tokens than this."""


def _batches_divide(config: "RunConfig") -> None:
    prompts, section = config.data.prompts_per_step, config.algorithm
    mini, micro = section.mini_batch_prompts, section.micro_batch_prompts
    if mini is not None and prompts % mini:
        divisor = max(size for size in range(1, min(mini, prompts) + 1) if prompts % size == 0)
        raise ValueError(
            f"algorithm.mini_batch_prompts must divide data.prompts_per_step={prompts}, so that all updates are of "
            f"one size, got {mini}; take e.g. {divisor}"
        )
    if micro is not None and micro > (mini or prompts):
        whole = f"data.prompts_per_step={prompts}" if mini is None else f"algorithm.mini_batch_prompts={mini}"
        raise ValueError(f"algorithm.micro_batch_prompts must be <= {whole}, got {micro}; lower it")


def _rows_hold_sequences(config: "RunConfig") -> None:
    if config.row_tokens < config.context_tokens:
        raise ValueError(
            f"algorithm.row_tokens must be >= data.max_prompt_tokens + rollout.max_new_tokens = "
            f"{config.context_tokens}, got {config.row_tokens}; raise it, or leave it out"
        )


def _rewards_fit_together(config: "RunConfig") -> None:
    if not config.rewards:
        raise ValueError("rewards must name at least one reward, got none; add e.g. {name: exact_answer}")
    check_rewards(config.rewards)
    names = [spec.shown for spec in config.rewards]
    if (name := config.data.pass_rate) is not None and name not in names:
        raise ValueError(f"data.pass_rate must name one of the rewards {names}, got {name!r}; leave it unset for all")


def _cache_fits(config: "RunConfig") -> None:
    rollout, page = config.rollout, config.rollout.page_size
    prompt = config.context_tokens - 1 if config.environment.is_on else config.data.max_prompt_tokens  # of a last turn
    tokens = max(config.context_tokens + CACHE_MARGIN_TOKENS, prompt + PROMPT_MARGIN_TOKENS)
    needed = -(-tokens // page) * page
    if rollout.kv_tokens is not None and rollout.kv_tokens < needed:
        raise ValueError(
            f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens}, "
            f"{CACHE_MARGIN_TOKENS} spare, and {PROMPT_MARGIN_TOKENS} beside a prompt, whole pages of {page}), got "
            f"{rollout.kv_tokens}; raise it or shorten prompts or completions"
        )


def _paddings_within_limit(config: "RunConfig") -> None:
    paddings, most = config.rollout.batch_paddings, config.rollout.max_running_requests
    if paddings and max(paddings) > most:
        raise ValueError(
            f"rollout.batch_paddings must be at most rollout.max_running_requests={most}, got {list(paddings)}; drop "
            "the larger ones, or raise the limit"
        )


def _release_makes_room(config: "RunConfig") -> None:
    if config.rollout.release_during_update and config.meshes.layout == "split":
        raise ValueError(
            "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing "
            "on the trainer's devices: leave it false"
        )


def _export_has_what_it_needs(config: "RunConfig") -> None:
    export = config.export
    if export.kind == "adapter" and config.model.lora.rank is None:
        raise ValueError(
            "export.kind=adapter needs a model with adapters, got model.lora.rank unset; use export.kind=model, which "
            "writes the whole model"
        )
    if export.every != "best":
        return
    if config.evaluation.path is None and config.data.builtin is None:
        raise ValueError("export.every=best needs held-out data, got none; set evaluation.path, or use last")
    if not config.checkpoint.keep_best:
        raise ValueError(
            "export.every=best needs checkpoint.keep_best=true, got false; without, the best step is not kept: set it, "
            "or use last"
        )


def _ratio_is_of_a_filter(config: "RunConfig") -> None:
    if config.algorithm.filtered_ratio and not config.rollout.filters:
        raise ValueError(
            "algorithm.filtered_ratio=true needs rollout.top_k, top_p or min_p, got none of them; without a filter the "
            "ratio is exact: set one, or leave filtered_ratio out"
        )


def _groups_vary(config: "RunConfig") -> None:
    if config.rollout.temperature == 0.0:
        raise ValueError(
            "rollout.temperature must be > 0 for training, got 0.0; greedy completions of a group are all the same, so "
            "every advantage is zero. Try 1.0"
        )


def _hosts_described(config: "RunConfig") -> None:
    hosts = config.hosts
    if hosts.index >= hosts.count:
        raise ValueError(f"hosts.index must be below hosts.count={hosts.count}, got {hosts.index}; indices start at 0")
    if hosts.count > 1 and hosts.coordinator is None:
        raise ValueError(
            f"hosts.count={hosts.count} needs hosts.coordinator, got none; set it to host:port of process 0"
        )


def _trained_once(config: "RunConfig") -> None:
    lora, layers = config.model.lora, config.model.train_layers
    if layers is not None and lora.rank is not None:
        raise ValueError(
            f"model.train_layers={layers} and model.lora.rank={lora.rank} exclude each other; for adapters in some "
            "layers use model.lora.layers"
        )
    for name in ("layers", "path"):
        if lora.rank is None and (value := getattr(lora, name)) is not None:
            raise ValueError(f"model.lora.{name}={value} needs model.lora.rank, got none; set it, e.g. to 16")


def _nothing_is_lost(config: "RunConfig") -> None:
    model, compact = config.model, config.optimizer.compact
    if model.param_dtype == "bfloat16" and not compact:
        raise ValueError(
            "model.param_dtype=bfloat16 needs optimizer.state=compact, got full; a step of 1e-6 is far below half a "
            "bit of a bfloat16 weight and would be lost: set it, or use model.param_dtype=float32"
        )
    if model.param_dtype == "bfloat16" and model.dtype != "bfloat16":
        raise ValueError(
            f"model.param_dtype=bfloat16 needs model.dtype=bfloat16, got {model.dtype}; use model.param_dtype=float32"
        )


def _decay_is_used(config: "RunConfig") -> None:
    section = config.optimizer
    if section.decay_steps and section.schedule != "wsd":
        raise ValueError(
            f"optimizer.decay_steps={section.decay_steps} needs optimizer.schedule=wsd, got {section.schedule}; set "
            "it, or leave decay_steps at 0"
        )


def _one_kind_of_source(config: "RunConfig") -> None:
    data = config.data
    if not data.sources:
        return
    if data.path != BUILTIN_TASK:
        raise ValueError(
            f"data.path={data.path} and data.sources exclude each other; make it one of the sources, {{path: ...}}"
        )
    for name in ReadingSection.model_fields:
        if value := getattr(data, name):
            raise ValueError(
                f"data.{name} must be set for each of data.sources, got {value} beside them; move it there"
            )
    names = [source.name for source in data.sources if source.name is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data.sources must have names of their own, got {twice} twice; rename one")


def _evaluation_tells_something(config: "RunConfig") -> None:
    section = config.evaluation
    if section.k is not None and (above := [k for k in section.k if k > section.samples]):
        raise ValueError(
            f"evaluation.k must be at most evaluation.samples={section.samples}, got {above}; take more samples, or "
            "drop them"
        )
    if section.rewards is not None:
        if not section.rewards:
            raise ValueError("evaluation.rewards must name at least one reward, got none; leave it unset for the run's")
        check_rewards(section.rewards)
    rewards = [spec.shown for spec in (config.rewards if section.rewards is None else section.rewards)]
    modes = ["greedy", "sampled", *(f"{name}@{k}" for k in section.every_k for name in ("pass", "maj"))]
    if section.best is not None:
        mode, _, reward = section.best.partition("/")
        if mode not in modes or reward not in rewards:
            raise ValueError(
                f"evaluation.best must be MODE/REWARD with a mode of {modes} and a reward of {rewards}, got "
                f"{section.best!r}"
            )


def _groups_are_judged_by_themselves(config: "RunConfig") -> None:
    if config.drops_uninformative and config.algorithm.advantage == "reinforce_pp":
        setting = "algorithm.drop_uninformative=true" if config.algorithm.drop_uninformative else "data.dynamic"
        raise ValueError(
            f"{setting} does not go with algorithm.advantage=reinforce_pp, whose baseline is the whole step's: groups "
            "of equal rewards teach something there; take reinforce_pp_baseline, or leave it out"
        )


def _recorded_steps_come(config: "RunConfig") -> None:
    steps, last = config.logging.profile_steps, config.run.max_steps
    if beyond := [step for step in steps if step > last]:
        raise ValueError(
            f"logging.profile_steps must be at most run.max_steps={last}, got {beyond}; drop them, or raise "
            "run.max_steps"
        )


def _conversations_have_a_template(config: "RunConfig") -> None:
    data, environment = config.data, config.environment
    if NO_DATA in config.data_paths.values() and not environment.is_on:
        raise ValueError(f"data.path={NO_DATA} needs environment.name, got none; its prompts are all empty: set it")
    if not environment.is_on:
        return
    if not data.chat_template:
        raise ValueError(
            "environment.name needs data.chat_template=true, got false; the template says how turns are told apart"
        )
    if data.final_assistant == "continue":
        raise ValueError(
            "environment.name does not go with data.final_assistant=continue: a conversation begins with the policy's "
            "own turn; take drop, or leave it out"
        )
    if environment.on_error != "value" and environment.error_value:
        raise ValueError(
            f"environment.error_value={environment.error_value} needs environment.on_error=value, got "
            f"{environment.on_error}; set it, or leave error_value out"
        )


RULES = (
    _batches_divide,
    _rows_hold_sequences,
    _rewards_fit_together,
    _cache_fits,
    _paddings_within_limit,
    _release_makes_room,
    _ratio_is_of_a_filter,
    _groups_vary,
    _hosts_described,
    _trained_once,
    _nothing_is_lost,
    _decay_is_used,
    _one_kind_of_source,
    _evaluation_tells_something,
    _export_has_what_it_needs,
    _groups_are_judged_by_themselves,
    _recorded_steps_come,
    _conversations_have_a_template,
)
