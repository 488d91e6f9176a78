"""A PromptStream gives the batch of prompts for each step, from an endless sequence of epochs over the config's data.

Every epoch is shuffled anew. With three prompts a, b, c and two per step (P = 2), for example, step ``s`` (counted from
1) has the positions ``2s - 2`` and ``2s - 1`` of the stream, so that a batch may be of two epochs:

    epoch 0: c a b   epoch 1: a b c   ...
    step 1: c a      step 2: b a      step 3: b c

A mixture alternates between its sources. Among the first n positions, each source has its share of n, to within one
prompt. Each source goes through its own epochs. With weights 2 and 1 for the sources x and y: x y x x y x x y ...

The prompt at a position depends only on the data, the settings and the seed, so every host gets the same prompts.
``batch(step)`` assumes that every step uses P positions. If steps skip prompts, prompt_draw.py finds the positions.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_grpo.config import DataSection, EvaluationSection
from tpu_grpo.data.chat_messages import Conversation
from tpu_grpo.data.lazy_records import Mapped, Record, Records
from tpu_grpo.data.prompt_selection import sorted_epochs
from tpu_grpo.data.rendering import PromptRenderer, RenderedPrompts, ToolsOf, render_records
from tpu_grpo.data.sources import Source, glance, read_records
from tpu_grpo.records.errors import ConfigError, DataError
from tpu_grpo.records.stages import Prompt, PromptBatch

if TYPE_CHECKING:
    import grain
    from transformers import PreTrainedTokenizerFast

SOURCE_COLUMN = "source"
"""The column that records of a mixture get, with the name of their source."""


@dataclass(frozen=True)
class Part:
    """The prompts of one source, and its weight in the mixture."""

    name: str
    rendered: RenderedPrompts
    weight: float = 1.0


class PromptStream:
    """Gives batches of P prompts, for any step, from rendered prompts of one source or of several.

    ``seed`` decides the shuffles, if epochs are shuffled. Every epoch of every source is sorted by ``curriculum``, the
    name of a column.

    Raises:
        DataError: for a source without a prompt, or a curriculum's values that cannot be sorted.
    """

    def __init__(
        self, parts: Sequence[Part], *, prompts_per_step: int, seed: int, shuffle: bool, curriculum: str | None = None
    ):
        import grain  # imports jax, which checking and showing a config do without

        for part in parts:
            if not part.rendered.prompts:
                raise DataError(f"a stream needs at least one prompt, got none from {part.name}; add records to it")
        self.parts = tuple(parts)
        self._prompts_per_step = prompts_per_step
        self._settings = [prompts_per_step, seed, shuffle, curriculum]
        self._ends = list(accumulate(len(part.rendered.prompts) for part in parts))
        orders = []
        for part, start, own_seed in zip(parts, [0, *self._ends[:-1]], _seeds(seed, len(parts)), strict=True):
            if curriculum is None:
                order = shuffled(len(part.rendered.prompts), own_seed, shuffle)
            else:
                order = sorted_epochs(part.rendered.column(curriculum), curriculum, own_seed, shuffle)
            orders.append(order.map(lambda index, start=start: start + index))
        self._order = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, [part.weight for part in parts])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the records' columns, which rewards get as arguments."""
        return tuple(self.parts[0].rendered.prompts[0].columns)

    @property
    def size(self) -> int:
        """Return the number of prompts of all sources together."""
        return self._ends[-1]

    @property
    def dropped(self) -> int:
        """Return the number of records left out because their prompt is longer than data.max_prompt_tokens."""
        return sum(part.rendered.dropped for part in self.parts)

    @property
    def notes(self) -> list[str]:
        """Return messages about the prompts, for the user at the start of a run."""
        return [f"{self.dropped} prompts were dropped: longer than data.max_prompt_tokens"] if self.dropped else []

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256, in hex, of everything that determines the prompts of each step."""
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for part in self.parts:
            digest.update(f"{part.name} {part.weight!r} {len(part.rendered.prompts)}\n".encode())
            digest.update(part.rendered.digest.encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the digest, and for every source its prompts, weight and number of dropped prompts."""
        sources = [
            {"name": p.name, "weight": p.weight, "prompts": len(p.rendered.prompts), "dropped": p.rendered.dropped}
            for p in self.parts
        ]
        return {"digest": self.digest, "sources": sources}

    def batch(self, step: int) -> PromptBatch:
        """Return the prompts of a step of a run whose steps all have P prompts; raises DataError for a step below 1."""
        if step < 1:
            raise DataError(f"a step must be >= 1, got {step}; steps count from 1")
        start = (step - 1) * self._prompts_per_step
        return self.at(step, range(start, start + self._prompts_per_step))

    def at(self, step: int, positions: Sequence[int], number: int = 0) -> PromptBatch:
        """Return the prompts at some positions as a batch of a step; ``number`` is its index within the step."""
        records = tuple(self.record(position) for position in positions)
        return PromptBatch(step, tuple(map(self.prompt, records)), records, tuple(positions), number)

    def record(self, position: int) -> int:
        """Return the index of the prompt at a position of the stream; `prompt` returns the prompt of an index."""
        found = self._order[position]
        assert found is not None  # grain gives None only for filtered elements
        return int(found)

    def prompt(self, record: int) -> Prompt:
        """Return a prompt by its index among the prompts of all sources, one source after another."""
        part = bisect_right(self._ends, record)
        return self.parts[part].rendered.prompts[record - (self._ends[part - 1] if part else 0)]


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256, in hex, of the tokens and columns of prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(
            json.dumps([prompt.token_ids, dict(prompt.columns)], default=str).encode("utf-8", "backslashreplace")
        )
    return digest.hexdigest()


def _seeds(seed: int, count: int) -> list[int]:
    """Return a seed for every source: the run's seed if there is one source, else a different seed for each."""
    if count == 1:
        return [seed]
    return [int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) for index in range(count)]


# --- the order of one source -----------------------------------------------------------------------------------------


def shuffled(count: int, seed: int, shuffle: bool) -> "grain.MapDataset[int]":
    """Return an endless sequence of epochs, each of all indices below ``count``: shuffled anew if ``shuffle`` is set,
    otherwise ascending."""
    import grain  # imports jax, which checking and showing a config do without

    order = grain.MapDataset.source(range(count))
    # grain hashes the seed before it adds the epoch: runs with neighbouring seeds have no epoch in common.
    return (order.seed(seed).shuffle() if shuffle else order).repeat()


# --- from the config -------------------------------------------------------------------------------------------------


def columns_at_a_glance(
    data: DataSection, evaluation: EvaluationSection
) -> tuple[Collection[str] | None, Collection[str] | None]:
    """Return the columns of the training data and of the held-out data, from the first record of every source.

    Either is None if reading a first record would take long. Raises an error if a record does not fit its template.
    """
    records = [_first_record(source, style) for source, style in training_sources(data)]
    columns = None
    if all(record is not None for record in records):
        columns = list(dict.fromkeys(name for record in records if record is not None for name in record))
        if data.curriculum is not None and data.curriculum not in columns:
            raise ConfigError(
                f"data.curriculum={data.curriculum} must be a column, the data has {', '.join(columns)}; correct it"
            )
        columns += [SOURCE_COLUMN] if data.sources else []
    held_out = held_out_source(evaluation, data)
    return columns, None if held_out is None else _first_record(*held_out)


def _first_record(source: Source, style: DataSection) -> Record | None:
    if (record := glance(source)) is not None:
        Conversation(style).messages(record, f"record 0 of {source.name} (from 0)")
    return record


def open_prompts(
    data: DataSection, seed: int, tokenizer: "PreTrainedTokenizerFast", tools_of: ToolsOf | None = None
) -> PromptStream:
    """Read, render and check every prompt of the data; ``seed`` (run.seed) decides the shuffles.

    ``tools_of`` is given if prompts begin conversations with environments; the prompts then contain the tools.

    Records of a mixture get the columns of all its sources, with null for columns that their own source lacks, and the
    column `source`.

    Raises:
        ConfigError: for templates that do not fit the data or the tokenizer.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    sources = training_sources(data)
    renderers = [PromptRenderer(style, tokenizer, tools_of) for _, style in sources]  # quick checks come first
    read = [read_records(source) for source, _ in sources]
    names, weights = [source.name for source, _ in sources], [1.0]
    if data.sources:
        names = [spec.name or f"source{index}" for index, spec in enumerate(data.sources)]
        read, weights = _with_all_columns(read, names), [spec.weight for spec in data.sources]
    parts = [
        Part(name, render_records(renderer, records, source.name), weight)
        for name, weight, renderer, records, (source, _) in zip(names, weights, renderers, read, sources, strict=True)
    ]
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

    Held-out data is evaluation.path or, if it is not set, the held-out problems of the built-in task that is trained
    on; without either, the result is None. Prompts are rendered as in training, but by evaluation.prompt_template if
    that is set.

    Raises:
        ConfigError: for templates that do not fit the data.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    if (found := held_out_source(evaluation, data)) is None:
        return None
    source, style = found
    renderer = PromptRenderer(style, tokenizer, tools_of)
    return tuple(render_records(renderer, read_records(source), source.name, limit=evaluation.prompts).prompts)


def _with_all_columns(read: Sequence[Records], names: Sequence[str]) -> list[Records]:
    columns = list(dict.fromkeys(column for records in read for column in records[0]))
    if SOURCE_COLUMN in columns:
        raise DataError(
            f"data.sources: records of a mixture get a column {SOURCE_COLUMN!r} with their source's name, and one has "
            f"such a column already; rename it, e.g. columns: {{origin: {SOURCE_COLUMN}}}"
        )

    def completed(records: Records, name: str) -> Records:
        return Mapped(records, lambda record, _: {**dict.fromkeys(columns), **record, SOURCE_COLUMN: name})

    return list(map(completed, read, names))


def training_sources(data: DataSection) -> list[tuple[Source, DataSection]]:
    """Return every source of training prompts, with the settings by which its prompts are rendered."""
    if not data.sources:
        return [(Source(data.path, data), data)]
    return [
        (Source(spec.path, spec, setting=f"data.sources.{n}.path"), _with_template(data, spec.prompt_template))
        for n, spec in enumerate(data.sources)
    ]


def held_out_source(evaluation: EvaluationSection, data: DataSection) -> tuple[Source, DataSection] | None:
    """Return the source of held-out prompts, with the settings by which they are rendered; None without a source."""
    path = evaluation.path if evaluation.path is not None else data.builtin
    if path is None:
        return None
    source = Source(path, evaluation, "heldout", "evaluation.path")
    return source, _with_template(data, evaluation.prompt_template)


def _with_template(data: DataSection, template: str | None) -> DataSection:
    return data if template is None else data.model_copy(update={"prompt_template": template, "messages": None})
