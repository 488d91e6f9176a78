"""The config leads to a stream for training and to held-out prompts here: data is read, rendered and checked."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpu_grpo.config import DataSection, EvaluationSection, SourceSpec
from tpu_grpo.data.records import Mapped, Record, Records
from tpu_grpo.data.rendered import RenderedPrompts, render_records
from tpu_grpo.data.rendering import PromptRenderer, ToolsOf
from tpu_grpo.data.sources import Source, read_records
from tpu_grpo.data.stream import Part, PromptStream
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCE_COLUMN = "source"
"""Records of a mixture get this column, which holds the name of their source."""


def open_prompts(
    data: DataSection, seed: int, tokenizer: "PreTrainedTokenizerFast", tools_of: ToolsOf | None = None
) -> PromptStream:
    """Read, render and check every prompt of the data; ``seed`` (run.seed) decides the shuffles.

    With ``tools_of`` prompts begin conversations with environments, and offer their tools.

    Records of a mixture get the columns of all its sources, null where their own source has none, and the column
    `source`.

    Raises:
        ConfigError: for templates that do not fit the data or the tokenizer.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    parts = _mixture(data, tokenizer, tools_of) if data.sources else [_single_source(data, tokenizer, tools_of)]
    return PromptStream(
        parts, prompts_per_step=data.prompts_per_step, seed=seed, shuffle=data.shuffle, curriculum=data.curriculum
    )


def open_evaluation_prompts(
    evaluation: EvaluationSection,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    tools_of: ToolsOf | None = None,
) -> tuple[Prompt, ...] | None:
    """Render the first evaluation.prompts prompts of the held-out data that fit, or all if there are fewer.

    Held-out data is evaluation.path, or a built-in task's held-out problems when it is trained on and no path is
    set; None when there is neither. They are rendered as the training prompts are, by a template of their own if
    evaluation.prompt_template is set.

    Raises:
        ConfigError: for templates that do not fit the data.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    path = evaluation.path if evaluation.path is not None else data.builtin
    if path is None:
        return None
    source = Source(path, evaluation, "heldout", "evaluation.path")
    style = with_template(data, evaluation.prompt_template)
    rendered = render_records(
        PromptRenderer(style, tokenizer, tools_of), read_records(source), data, source.name, limit=evaluation.prompts
    )
    return tuple(rendered.prompts)


def _single_source(data: DataSection, tokenizer: "PreTrainedTokenizerFast", tools_of: ToolsOf | None) -> Part:
    source = Source(data.path, data)
    rendered = render_records(PromptRenderer(data, tokenizer, tools_of), read_records(source), data, source.name)
    return Part(source.name, rendered)


def _mixture(data: DataSection, tokenizer: "PreTrainedTokenizerFast", tools_of: ToolsOf | None) -> list[Part]:
    read = [
        read_records(Source(spec.path, spec, setting=f"data.sources.{index}.path"))
        for index, spec in enumerate(data.sources)
    ]
    names = [spec.name or f"source{index}" for index, spec in enumerate(data.sources)]
    columns = list(dict.fromkeys(column for records in read for column in records[0]))
    if SOURCE_COLUMN in columns:
        raise DataError(
            f"data.sources: records of a mixture get a column {SOURCE_COLUMN!r} with their source's name, and one has "
            f"such a column already; rename it, e.g. columns: {{origin: {SOURCE_COLUMN}}}"
        )
    renderers = (PromptRenderer(with_template(data, s.prompt_template), tokenizer, tools_of) for s in data.sources)
    return [
        Part(name, _render_source(records, columns, name, spec, data, renderer), spec.weight)
        for name, records, spec, renderer in zip(names, read, data.sources, renderers, strict=True)
    ]


def _render_source(
    records: Records,
    columns: Sequence[str],
    name: str,
    spec: SourceSpec,
    data: DataSection,
    renderer: PromptRenderer,
) -> RenderedPrompts:
    nulls = dict.fromkeys(columns)

    def complete(record: Record, index: int) -> Record:
        return {**nulls, **record, SOURCE_COLUMN: name}

    completed = Mapped(records, complete)
    return render_records(renderer, completed, data, Source(spec.path).name)


def with_template(data: DataSection, template: str | None) -> DataSection:
    """Return the settings with another template, where there is one, in place of data.prompt_template."""
    return data if template is None else data.model_copy(update={"prompt_template": template, "messages": None})
