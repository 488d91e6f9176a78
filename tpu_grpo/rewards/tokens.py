"""What rewards of single tokens give: a number for each token of a completion, which the learner adds to its advantage.

    lengths      [3           2      ]      the tokens of two completions, the stop token included
    a reward     [[0 0.5 -1]  None   ]      weight 2
    another      [[1 0   0 ]  [0 0.2]]      weight 1
    Scores       [[1 1 -2  ]  [0 0.2]]      per_token: the weighted sum, 0 where a reward does not apply
    by_name      -0.5, nan and 1, 0.2       of each completion: the sum over its tokens, before weighting

None of it is a part of the total reward, from which the advantages of completions are taken: nothing counts twice.
"""

import base64
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tpu_grpo.rewards.batches import SHORT_REPR, Problem, length_of, number_or_none

TokenValues = Float[np.ndarray, "_"]
"""float64, a number per token; of length 0 for a completion that the reward says nothing of."""
NO_VALUES: TokenValues = np.zeros(0)


def check_token_values(values: Any, lengths: Sequence[int]) -> tuple[list[float], list[TokenValues], list[Problem]]:
    """Turn what a reward of single tokens returned for completions of these ``lengths`` into numbers.

    Returns:
        Of each completion the sum over its tokens, NaN for None; the numbers of its tokens; the problems found.
    """
    nothing = [math.nan] * len(lengths), [NO_VALUES] * len(lengths)
    if (found := length_of(values)) != len(lengths):
        got = f"a {type(values).__name__}" if found is None else f"{found} values"
        text = f"must return a list with one list of numbers (or None) per completion, {len(lengths)} here, got {got}"
        return *nothing, [Problem("wrong", text)]
    sums, of_tokens, problems = *nothing, []
    for row, (value, count) in enumerate(zip(values, lengths, strict=True)):
        if value is None:
            continue
        found = _numbers(value, count)
        if isinstance(found, str):
            problems.append(Problem("wrong", found, row))
        else:
            sums[row], of_tokens[row] = math.fsum(found), found
    return sums, of_tokens, problems


def _numbers(value: Any, count: int) -> TokenValues | str:
    """Return the numbers of a completion's tokens, or what is wrong with them."""
    if (found := length_of(value)) != count:
        got = SHORT_REPR.repr(value) if found is None else f"{found} values"
        return f"must return one number per token, {count} for this completion (the stop token counts, too), got {got}"
    array_T = np.asarray(value) if hasattr(value, "dtype") else np.array([_or_nan(each) for each in value])
    if array_T.ndim != 1 or array_T.dtype.kind not in "biuf" or not np.isfinite(array_T).all():
        return f"must return finite numbers per token, got {SHORT_REPR.repr(value)}"
    return array_T.astype(np.float64)


def _or_nan(value: Any) -> float:
    number = number_or_none(value)
    return math.nan if number is None else number


def weighted_tokens(
    given: Sequence[tuple[float, Sequence[TokenValues]]], lengths: Sequence[int]
) -> tuple[TokenValues, ...]:
    """Add up what rewards of single tokens gave, in order: pairs of a weight and the values of all completions."""
    total = [np.zeros(length) for length in lengths]
    for weight, of_tokens in given:
        for row, values_T in enumerate(of_tokens):
            if len(values_T):
                total[row] += weight * values_T
    return tuple(total)


def comparable(sums: Sequence[float], of_tokens: Sequence[TokenValues]) -> list[str]:
    """Say of every completion what other hosts must have, too: the sum, and a digest of the numbers."""
    return [
        f"{value!r} in all, digest of the tokens' {hashlib.sha256(values_T.tobytes()).hexdigest()[:12]}"
        for value, values_T in zip(sums, of_tokens, strict=True)
    ]


# --- between hosts ---------------------------------------------------------------------------------------------------


def packed(per_token: Sequence[TokenValues]) -> str:
    """Pack the numbers of all tokens, exactly, as a short text: most are often 0."""
    joined = np.concatenate([*per_token, NO_VALUES]).astype("<f8")
    return base64.b64encode(zlib.compress(joined.tobytes(), level=1)).decode()


def unpacked(texts: Mapping[int, str], lengths: Sequence[int], hosts: Sequence[int]) -> tuple[TokenValues, ...]:
    """Put together what each host packed; completions have these ``lengths``, and these ``hosts`` scored them."""
    numbers = {host: np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8") for host, text in texts.items()}
    taken, found = dict.fromkeys(numbers, 0), []
    for length, host in zip(lengths, hosts, strict=True):
        start = taken[host]
        taken[host] += length
        found.append(numbers[host][start : start + length].astype(np.float64))
    return tuple(found)
