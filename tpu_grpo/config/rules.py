"""What must hold between settings of different sections; each rule raises ValueError with value and remedy."""

from typing import TYPE_CHECKING

from tpu_grpo.config.rewards import check_rewards

if TYPE_CHECKING:
    from tpu_grpo.config.sections import RunConfig

CACHE_MARGIN_TOKENS = 2
"""sglang-jax cuts a completion short when the cache has fewer tokens than this beside it."""


def _micro_batches_divide(config: "RunConfig") -> None:
    prompts, micro = config.data.prompts_per_step, config.algorithm.micro_batch_prompts
    if micro is not None and prompts % micro:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
        raise ValueError(
            f"algorithm.micro_batch_prompts must divide data.prompts_per_step={prompts}, got {micro}; "
            f"use one of {divisors}"
        )


def _rewards_fit_together(config: "RunConfig") -> None:
    if not config.rewards:
        raise ValueError("rewards must name at least one reward, got none; add e.g. {name: exact_answer}")
    check_rewards(config.rewards)


def _cache_fits(config: "RunConfig") -> None:
    rollout, page = config.rollout, config.rollout.page_size
    needed = -(-(config.context_tokens + CACHE_MARGIN_TOKENS) // page) * page
    if rollout.kv_tokens is not None and rollout.kv_tokens < needed:
        raise ValueError(
            f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens}, "
            f"{CACHE_MARGIN_TOKENS} spare, whole pages of {page}), got "
            f"{rollout.kv_tokens}; raise it or shorten prompts or completions"
        )


def _paddings_within_limit(config: "RunConfig") -> None:
    paddings, most = config.rollout.batch_paddings, config.rollout.max_running_requests
    if paddings and max(paddings) > most:
        raise ValueError(
            f"rollout.batch_paddings must be at most rollout.max_running_requests={most}, got {list(paddings)}; drop "
            "the larger ones, or raise the limit"
        )


def _native_pages(config: "RunConfig") -> None:
    if config.rollout.attention == "native" and config.rollout.page_size != 1:
        raise ValueError(
            f"rollout.page_size must be 1 with rollout.attention=native, got {config.rollout.page_size}; the library's "
            "native attention is wrong for larger pages: use gather (or flash on TPU)"
        )


def _release_makes_room(config: "RunConfig") -> None:
    if config.rollout.release_during_update and config.meshes.layout == "split":
        raise ValueError(
            "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing "
            "on the trainer's devices: leave it false"
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


RULES = (
    _micro_batches_divide,
    _rewards_fit_together,
    _cache_fits,
    _native_pages,
    _paddings_within_limit,
    _release_makes_room,
    _groups_vary,
    _hosts_described,
    _trained_once,
)
