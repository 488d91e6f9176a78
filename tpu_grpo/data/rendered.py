"""All prompts of a source: checked once at the start, and rendered again when they are asked for.

    rendered = render_records(renderer, records, data, "train.jsonl")
    rendered.prompts[7]                       # reads the record, fills the template, and makes the tokens
    rendered.dropped                          # the prompts that are too long

So a file of any size takes a few bytes of memory for each record. The check renders every text. It makes tokens only of
texts whose length in bytes does not show that they fit.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tpu_grpo.config import DataSection
from tpu_grpo.data.reading import reading
from tpu_grpo.data.records import Record
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Prompt

AT_ONCE = 500
"""So many records are rendered together."""


@dataclass(frozen=True)
class RenderedPrompts:
    """RenderedPrompts holds the prompts that fit, in the order of their records, and counts those too long."""

    prompts: Sequence[Prompt]
    dropped: int
    digest: str = ""
    """The sha256, in hex, of the texts and columns of all prompts and of what makes tokens of them."""

    def column(self, name: str) -> Iterator[tuple[Any, Record]]:
        """Yield every prompt's value in a column, None where it has none, and all its columns."""
        prompts = self.prompts
        records = prompts.records() if isinstance(prompts, LazyPrompts) else (prompt.columns for prompt in prompts)
        return ((record.get(name), record) for record in records)


class LazyPrompts(Sequence[Prompt]):
    """Prompts that are rendered when they are asked for.

    Args:
        renderer: renders them.
        of: all records.
        fitting: the indices of those whose prompts fit, ascending.
        source: names the data in errors.
    """

    def __init__(self, renderer: PromptRenderer, of: Sequence[Record], fitting: Sequence[int], source: str):
        self._renderer = renderer
        self._of = of
        self._fitting = fitting
        self._source = source

    def __len__(self) -> int:
        return len(self._fitting)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        record = self._fitting[index]
        return self._renderer.render(self._of[record], _where(record, self._source))

    def __iter__(self) -> Iterator[Prompt]:
        numbered = zip(self._fitting, self.records(), strict=True)
        while at_once := list(islice(numbered, AT_ONCE)):
            where = [_where(index, self._source) for index, _ in at_once]
            yield from self._renderer.prompts([record for _, record in at_once], where)

    def records(self) -> Iterator[Record]:
        """Yield the records of the prompts."""
        fitting = iter(self._fitting)
        wanted = next(fitting, None)
        for index, record in enumerate(self._of):
            if index == wanted:
                yield record
                wanted = next(fitting, None)


def render_records(
    renderer: PromptRenderer, records: Sequence[Record], data: DataSection, source: str, *, limit: int | None = None
) -> RenderedPrompts:
    """Check the prompts of all records, or render the first ``limit`` that fit; ``source`` names the data in errors.

    Raises:
        DataError: for a prompt longer than data.max_prompt_tokens under data.too_long=error, or when none fits.
    """
    fitting = array("q")
    too_long: dict[int, int] = {}  # tokens by index of the record
    digest = hashlib.sha256(renderer.identity.encode())
    numbered = enumerate(records)
    with reading(f"checking the prompts of {source}", len(records) if limit is None else 0, "prompts") as advance:
        while at_once := list(islice(numbered, AT_ONCE if limit is None else min(AT_ONCE, limit - len(fitting)))):
            where = [_where(index, source) for index, _ in at_once]
            conversations = renderer.conversations([record for _, record in at_once], where)
            texts = renderer.texts(conversations, where, renderer.tools([record for _, record in at_once], where))
            lengths = _lengths(renderer, texts, where, data.max_prompt_tokens)
            for (index, record), text, length in zip(at_once, texts, lengths, strict=True):
                if length > data.max_prompt_tokens:
                    too_long[index] = length
                else:
                    fitting.append(index)
                    digest.update(json.dumps([text, dict(record)], default=str).encode())
            advance(at_once[-1][0] + 1)
    if too_long and (data.too_long == "error" or not fitting):
        raise DataError(_too_long(too_long, len(fitting), data, source))
    prompts = LazyPrompts(renderer, records, fitting, source)
    return RenderedPrompts(prompts if limit is None else tuple(prompts), len(too_long), digest.hexdigest())


def _lengths(renderer: PromptRenderer, texts: list[str], where: Sequence[str], most: int) -> list[int]:
    """Return the tokens of each text, or a number that they do not exceed, and that is itself at most ``most``."""
    bounds = [renderer.most_tokens(text) for text in texts]
    lengths = [bound if bound is not None and bound <= most else -1 for bound in bounds]
    open_ones = [index for index, length in enumerate(lengths) if length < 0]
    if open_ones:
        encoded = renderer.encoded([texts[index] for index in open_ones], [where[index] for index in open_ones])
        for index, token_ids in zip(open_ones, encoded, strict=True):
            lengths[index] = len(token_ids)
    return lengths


def _where(index: int, source: str) -> str:
    return f"record {index} of {source} (from 0)"


def _too_long(too_long: Mapping[int, int], fitting: int, data: DataSection, source: str) -> str:
    first, longest = next(iter(too_long)), max(too_long.values())
    remedy = f"raise data.max_prompt_tokens to {longest}"
    if data.too_long == "error":
        remedy += " or set data.too_long=drop"
    return (
        f"prompts must have at most data.max_prompt_tokens={data.max_prompt_tokens} tokens, got {too_long[first]} in "
        f"record {first} of {source} (from 0; {len(too_long)} of {len(too_long) + fitting} are too long, the longest "
        f"{longest}); {remedy}"
    )
