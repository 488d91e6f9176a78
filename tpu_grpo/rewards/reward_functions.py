"""Loads an entry of ``rewards`` in the config: finds the function or class, and checks that it fits the data.

    call = load_reward(RewardSpec(name="my_rewards.py:short", options={"limit": 40}), columns={"question", "answer"})

    find_reward("gsm8k")                       # a shipped reward
    find_reward("my_package_reward")           # an entry point of the group tpu_grpo.rewards of an installed package
    find_reward("my_rewards.py:short")         # a file, relative to the working directory
    find_reward("my_package.rewards:short")    # a module

    reward_specs([*config.rewards, function])            # functions that are passed to train become entries

All checks that need no completion are made here: whether the name, file and function exist, whether the signature fits
the data's columns and the options, and whether the options of shipped rewards have valid values.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from tpu_grpo.config import GIVEN, RewardSpec, parse_config
from tpu_grpo.config.plugins import find_function, need, not_shipped
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.rewards.protocol import (
    BATCH_ARGUMENTS,
    BY_KWARGS,
    COMPLETIONS,
    EXTRAS,
    ROW_ARGUMENTS,
    ROWS_AT_A_TIME,
    SAMPLE_ARGUMENTS,
    TEXT_ARGUMENTS,
    gives_tokens,
    rows_at_a_time,
)
from tpu_grpo.rewards.reward_call import (
    VERL_COMPLETIONS,
    VERL_INFO,
    VERL_TRUTH,
    VERL_TRUTH_COLUMN,
    AnswerParser,
    Call,
    Caller,
    RewardBatch,
)
from tpu_grpo.rewards.shipped import SHIPPED, Shipped, Thinking
from tpu_grpo.workers.process import check_secrets

OTHER_ANSWERS = {
    **{name: name for name in ("solution", "output", "ground_truth", "target", "final_answer", "expected_answer")},
    "reward_model": "reward_model.ground_truth",
}
"""Column in other trainers' data -> path of the correct answer, as data.columns of the config takes it."""
ENTRY_POINTS = "tpu_grpo.rewards"
"""The group of entry points through which installed packages offer rewards."""
GivenReward = Callable[..., Any] | RewardSpec | Mapping[str, Any] | str
"""A function, class or callable object; a name; or an entry of the config whose ``name`` is any of these."""


def load_reward(spec: RewardSpec, columns: Collection[str], max_steps: int = 0) -> Call:
    """Find the reward that ``spec`` names, and decide how it is called on data with these ``columns``.

    ``max_steps`` is the number of steps of the run, which rewards can read in ``trainer_state``.

    Raises:
        RewardError: for a name that is not found (see ``find_reward``), a required parameter without a column or
            option, or an option that the reward does not take.
        ConfigError: for a reward that takes environments but runs in the main process.
    """
    target, (spec, thinking) = target_of(spec), _thinking(spec)
    function, constructor, options = target, None, spec.options
    if inspect.isclass(target):
        if "__call__" not in dir(target):
            raise RewardError(
                f"reward {spec.name} must have a method __call__ that scores, got a class without; add one"
            )
        function, constructor = target.__call__, signature_of(spec.name, target)
    signature = signature_of(spec.name, function, skip_self=constructor is not None)
    if constructor is None and _makes_rewards(target, signature, columns, options):
        function, constructor = _made(spec, target), signature
        signature = signature_of(spec.name, function)
    form, call_options = form_of(function, signature), {} if constructor else options
    extras = form.extras({*columns, *call_options} - {"parser"})
    _check_options(spec, constructor or signature, takes_all="options" in extras)
    per_token = gives_tokens(function)
    check_secrets(spec.secrets, f"secrets of reward {spec.shown}")
    _check_extras(spec, extras, per_token=per_token)
    offered = form.offered(columns)
    _check_filled(spec, signature, [*offered.values(), *call_options], [form.shown(name) for name in extras])
    if constructor:
        _check_filled(spec, constructor, list(options), ())
    fixed = {*call_options}
    if spec.name in SHIPPED:  # think_answer's option answer is no column
        fixed |= {n for n, p in signature.named.items() if p.default not in (p.empty, None)}
    arguments = tuple(n for n, shown in offered.items() if shown not in fixed and form.takes(shown))
    secrets = spec.secrets
    if spec.name == "judge":  # the variable of its API key need not be listed in secrets
        secrets += (str(options.get("api_key_variable", "OPENAI_API_KEY")),)
    call = Call(
        name=spec.shown,
        source=spec.name,
        arguments=arguments,
        beside=tuple(n for n in offered if n not in arguments) if {"batch", "states"} & {*extras} else (),
        renamed={**{name: form.shown(name) for name in extras}, **offered},
        is_built=constructor is not None,
        passed_options={n: v for n, v in options.items() if (constructor or signature).takes(n) and n not in extras},
        options=options,
        extras=extras,
        concurrency=form.concurrency,
        is_async=inspect.iscoroutinefunction(function),
        messages=spec.messages or _defaults(spec).messages,
        thinking=thinking,
        per_token=per_token,
        verl=form.verl,
        max_steps=max_steps,
        find_failing_row=spec.on_error == "stop",
        secrets=secrets,
    )
    if spec.name in SHIPPED:
        _try_options(spec, call, target)
    return call


def _thinking(spec: RewardSpec) -> tuple[RewardSpec, Thinking]:
    """Return a reward's entry without the option after_thinking of rewards of answers, and what the reward is given of
    a completion that thinks. A pattern that names a tag of thinking is for the whole text."""
    default, options = _defaults(spec).thinking, dict(spec.options)
    if spec.name in ("format", "regex") and "think>" in str(options.get("pattern")):
        default = "counted"
    if default == "dropped if opened" and (value := options.pop("after_thinking", None)) is not None:
        if not isinstance(value, bool):
            raise RewardError(f"reward {spec.name}: after_thinking must be true, false or null, got {value!r}")
        default = "dropped" if value else "kept"
    return spec.model_copy(update={"options": options}), default


def _makes_rewards(target: Any, signature: "Signature", columns: Collection[str], options: Mapping[str, Any]) -> bool:
    """Return whether a function is a reward factory, like open-r1's ``get_cosine_scaled_reward(max_len=1000)``. Such a
    function takes only options: no texts, columns or EXTRAS, and no ``**kwargs``."""
    given = {*columns, *TEXT_ARGUMENTS, *ROW_ARGUMENTS, *BATCH_ARGUMENTS, *EXTRAS}
    takes_rows = signature.has_kwargs or bool({*signature.named} - {*options} & given)
    return inspect.isfunction(target) and not takes_rows and rows_at_a_time(target) is None and not gives_tokens(target)


def _made(spec: RewardSpec, target: Any) -> Any:
    """Call a reward factory (a class or a function) with the options, and return the reward that it makes."""
    try:
        made = target(**spec.options)
    except Exception as error:  # user code can raise anything
        raise RewardError(
            f"{spec.name} takes no completions, so it must make a reward of its options {dict(spec.options)}, got "
            f"{type(error).__name__}: {error}; declare completions (or completion, of one row), or correct the options"
        ) from error
    if not callable(made) or inspect.isclass(made):
        raise RewardError(
            f"{spec.name} takes no completions, so it must make a reward of its options, got a {type(made).__name__}; "
            "declare completions (or completion, of one row), or name the reward itself"
        )
    return made


def target_of(spec: RewardSpec) -> Any:
    """Return the function, class or callable object of an entry of ``rewards``. Raises RewardError, see
    ``find_reward``."""
    return find_reward(spec.name) if spec.function is None else spec.function


def workers_of(spec: RewardSpec) -> int:
    """Return the number of a reward's worker processes: the config's, or else the reward's default."""
    if spec.function is not None:
        return 0  # a function passed to train exists in this process only
    return _defaults(spec).workers if spec.workers is None else spec.workers


def repeats_itself(spec: RewardSpec) -> bool:
    """Whether a reward is deterministic: the config's value, or else the reward's default."""
    return _defaults(spec).deterministic if spec.deterministic is None else spec.deterministic


def _defaults(spec: RewardSpec) -> Shipped:
    """Return the defaults of a reward's settings; a reward that is not shipped has one worker."""
    return SHIPPED.get(spec.name, Shipped("", workers=1, thinking="kept"))


# --- a name -> its function or class ---------------------------------------------------------------------------------


def find_reward(name: str) -> Any:
    """Return the function, class or callable object with the name ``name``.

    Files are found relative to the working directory and may import modules that lie beside them. Raises RewardError
    for an unknown name, or a file or module that is missing, fails to import or lacks the function.
    """
    if name.startswith(GIVEN):
        raise RewardError(
            f"reward {name.removeprefix(GIVEN)} was passed to tpu_grpo.train as a function, and its code is in no file "
            f"that {name!r} could name; pass it with rewards= again, or put it in a file and name path.py:function"
        )
    return find_function(name, "reward", RewardError) if ":" in name else _find_named(name)


def _find_named(name: str) -> Any:
    if name in SHIPPED:
        if library := SHIPPED[name].library:
            need(library, f"the reward {name}", RewardError)
        return SHIPPED[name].load()
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        try:
            return installed[name].load()
        except (Exception, SystemExit) as error:  # user code can raise anything
            raise RewardError(
                f"reward {name}, an entry point at {installed[name].value}, failed to load: {type(error).__name__}: "
                f"{error}; repair or remove the package that brings it"
            ) from error
    raise not_shipped(repr(name), name, "reward", SHIPPED, RewardError, installed=installed)


# --- does it fit the data and the options? ---------------------------------------------------------------------------


def _check_filled(spec: RewardSpec, signature: "Signature", offered: list[str], extras: Collection[str]) -> None:
    for parameter in signature.named.values():
        likely = OTHER_ANSWERS if parameter.name == "answer" else ()
        if parameter.default is parameter.empty and parameter.name not in (*offered, *extras):
            raise RewardError(
                f"reward {spec.name} requires the parameter {parameter.name!r}, which is neither a column of the data "
                f"nor an option; available: {', '.join(offered)}. Add the column (data.columns gives one another "
                "name), set it in the reward's options, or give the parameter a default"
                + next((f"; e.g. data.columns={{answer: {OTHER_ANSWERS[n]}}}" for n in likely if n in offered), "")
            )


def _check_options(spec: RewardSpec, signature: "Signature", *, takes_all: bool) -> None:
    if texts := sorted(set(spec.options) & {*TEXT_ARGUMENTS, *SAMPLE_ARGUMENTS}):
        raise RewardError(f"reward {spec.name}: options must not be called {texts}; these are the texts of the rollout")
    unknown = [name for name in spec.options if not signature.takes(name)]
    if unknown and not takes_all:
        known = ", ".join(signature.named)
        raise RewardError(f"reward {spec.name} does not take the options {unknown}; it takes: {known}")


def _check_extras(spec: RewardSpec, extras: Collection[str], *, per_token: bool) -> None:
    if "environments" in extras and workers_of(spec) == 0:
        remedy = "put it in a file and name path.py:function" if spec.function is not None else "set workers: 1 or more"
        raise ConfigError(
            f"reward {spec.shown} takes environments, whose attributes only a worker process opens, so its workers "
            f"must be >= 1, got 0; {remedy}, or take environment_rewards alone"
        )
    if per_token and "completion_ids" not in extras:
        raise RewardError(
            f"reward {spec.name} gives a number per token (@per_token), so it must take completion_ids, which say how "
            "many tokens there are, got a function that does not; declare it, and call no column or option so"
        )
    if per_token and spec.on_error == "value" and spec.error_value:
        raise RewardError(
            f"reward {spec.name} gives a number per token (@per_token), so its error_value must be 0, got "
            f"{spec.error_value}; one number says nothing about each token: leave it out, or use on_error: skip"
        )
    if "parser" in extras:
        try:
            AnswerParser(spec.options.get("parser"))
        except ValueError as error:
            raise RewardError(f"reward {spec.name}: {error}") from None


def _try_options(spec: RewardSpec, call: Call, target: Any) -> None:
    """Let a shipped reward check its options: build a class, or call a function on zero rows or one empty row."""
    try:
        if inspect.isclass(target):
            target(**spec.options)
        else:
            texts, size = (*TEXT_ARGUMENTS, "rendered_prompts"), 0 if call.concurrency is None else 1
            rows = {name: ["" if name in texts else None] * size for name in call.batch_columns}
            Caller(call, target).raw_outputs(RewardBatch(rows, 0, size))
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.name}, options {spec.options}: {error}") from error


# --- how a function wants to be called: with a batch of rows or with one ---------------------------------------------


@dataclass(frozen=True)
class Signature:
    """The named parameters of a function."""

    named: Mapping[str, inspect.Parameter]
    has_kwargs: bool

    def takes(self, name: str) -> bool:
        """Whether an argument of that name can be passed."""
        return self.has_kwargs or name in self.named


def signature_of(name: str, function: Any, *, skip_self: bool = False) -> Signature:
    """Read the signature of a function of the reward ``name``. Raises RewardError for a signature that cannot be read,
    or that has positional-only parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} must have a signature to check; wrap it in a Python function") from error
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(f"reward {name} must take its arguments by name, got positional-only {by_position}; drop '/'")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Signature(named, any(p.kind is p.VAR_KEYWORD for p in parameters))


@dataclass(frozen=True)
class Form:
    """How a function is called: on a batch or a row, and with which names."""

    signature: Signature
    concurrency: int | None
    """For a function of one row, the most rows that run concurrently if it is async; None for a function of a batch."""
    verl: bool

    def shown(self, name: str) -> str:
        """Return the parameter that receives the column ``name`` of a batch. In a function of one row, ``completions``
        goes to ``completion`` or another name for it in ROW_ARGUMENTS."""
        named, is_of_row = self.signature.named, self.concurrency is not None
        others = [n for n, batch in (ROW_ARGUMENTS if is_of_row else BATCH_ARGUMENTS).items() if batch == name]
        if name == "states" and "action" in named:  # Tunix's rewards
            others.append("task")
        usual = others[0] if is_of_row and others else name
        return next((other for other in others if other in named), usual)

    def offered(self, columns: Collection[str]) -> dict[str, str]:
        """Map each column of a batch to the parameter that receives it; texts take precedence over a column of the
        same name."""
        texts = {name: self.shown(name) for name in TEXT_ARGUMENTS}
        offered = texts | {n: n for n in columns if n not in TEXT_ARGUMENTS and n not in texts.values()}
        if self.verl and VERL_TRUTH not in columns and VERL_TRUTH_COLUMN in columns:
            offered[VERL_TRUTH_COLUMN] = VERL_TRUTH
        if self.concurrency is None:  # the column answer goes to answers, as in verl and verifiers
            named = self.signature.named
            plural = {n: f"{shown}s" for n, shown in offered.items() if shown not in named and f"{shown}s" in named}
            offered |= {n: shown for n, shown in plural.items() if shown not in columns}
        return offered

    def takes(self, name: str) -> bool:
        """Whether the function gets an argument of this name; verl's functions get nothing by ``**kwargs``."""
        return name in self.signature.named if self.verl else self.signature.takes(name)

    def extras(self, taken: Collection[str]) -> tuple[str, ...]:
        """Return the EXTRAS that the function receives, except names ``taken`` by columns or options."""
        named = self.signature.named
        wanted = [name for name in EXTRAS if self.shown(name) in named]
        if self.verl:
            wanted += [name for name in (VERL_INFO, f"{VERL_INFO}s") if name in named and VERL_INFO not in taken]
        elif self.signature.has_kwargs:
            wanted += [name for name in BY_KWARGS if name not in wanted]
        return tuple(name for name in wanted if self.shown(name) not in taken)


def form_of(function: Any, signature: Signature) -> Form:
    """Return how a function with this signature is called.

        def f(completions, answer)                                         a batch
        @per_sample def f(completion, answer)                              one row
        def f(completion, answer)                                          one row, as verifiers calls rewards
        def f(data_source, solution_str, ground_truth, extra_info=None)    one row, as verl calls rewards
        def f(data_sources, solution_strs, ground_truths, extra_infos)     a batch, as verl calls rewards of a batch

    An unmarked function of one row is recognised by its parameters: it has one of COMPLETIONS, and no name of a batch,
    such as ``completions`` or ``prompts``.
    """
    named = {*signature.named}
    of_a_batch = bool(named & {*TEXT_ARGUMENTS, *BATCH_ARGUMENTS})
    marked = rows_at_a_time(function)
    is_of_row = "completion" in named or (named & COMPLETIONS and "completion_ids" not in named)
    if marked is None and not of_a_batch and is_of_row:
        marked = ROWS_AT_A_TIME
    is_verl = bool(named & VERL_COMPLETIONS) and not named & {*TEXT_ARGUMENTS}
    return Form(signature, marked, is_verl)


# --- functions that are passed to train become entries of the config -------------------------------------------------


def reward_specs(rewards: Sequence[GivenReward]) -> list[RewardSpec]:
    """Convert rewards to entries of a config.

    A function that a worker process can import by the name of its module becomes an entry named
    ``package.module:function``. Any other reward (a lambda, a closure, a function of a notebook or of the script
    itself, an object) exists only in this process, and is called in it. Raises ConfigError for an empty list, an entry
    of another type, wrong settings, or workers that cannot import the function.
    """
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or not rewards:
        raise ConfigError(f"rewards must be a list of at least one function, got {rewards!r}; put it in a list")
    entries, functions = zip(*(_entry(given, position) for position, given in enumerate(rewards)), strict=True)
    pairs = zip(parse_config({"rewards": entries}).rewards, functions, strict=True)
    return [spec if function is None else spec.calling(function) for spec, function in pairs]


def _entry(given: GivenReward, position: int) -> tuple[RewardSpec | dict[str, Any], Any]:
    """Return an entry of the config, and its function if that exists only in this process, else None."""
    if isinstance(given, RewardSpec):
        return given, None
    entry = dict(given) if isinstance(given, Mapping) else {"name": given}
    if isinstance(name := entry.get("name"), str):
        return entry, None
    if not callable(name):
        raise ConfigError(
            f"rewards[{position}] must be a function, a name, or an entry of the config that has one of them as its "
            f"name, got {given!r}"
        )
    if (importable := importable_name(name)) is not None:
        return {**entry, "name": importable}, None
    own = _own_name(name, position)
    if entry.get("workers"):
        raise ConfigError(
            f"rewards[{position}], {own}, cannot run in {entry['workers']} workers: it is no function of a module that "
            "they can import; move it to a file of its own, or leave workers out"
        )
    return {**entry, "name": f"{GIVEN}{own}", "workers": 0}, name


def importable_name(function: Any) -> str | None:
    """Return the name by which another process can import a function or class; None if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    package = module.partition(".")[0]
    finders: Sequence[Any] = sys.meta_path  # which other processes have as well
    return f"{module}:{name}" if any(finder.find_spec(package, None) is not None for finder in finders) else None


def _own_name(function: Any, position: int) -> str:
    """Return the reward's name in metrics: the name of the function or of the object's class. A lambda is named by its
    position in the list, such as ``reward0``."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else f"reward{position}"
