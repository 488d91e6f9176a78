"""Directories as runs leave them, made without a run."""

import json
from collections.abc import Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tpu_grpo.observe.run_log import JsonlSink
from tpu_grpo.observe.sample_rows import SampleRow


def metrics(step: int) -> dict[str, Any]:
    """Every metric that a chart shows, and texts that must not become HTML."""
    return {
        "step": step,
        "rewards/mean": step / 10,
        "rewards/std": 0.1,
        "rewards/exact_answer/mean": step / 20,
        "rewards/$x_1$ <b>/mean": 0.5,
        "rewards/seconds": 0.1,
        "groups/zero_variance_fraction": 0.25,
        "completions/mean_tokens": 20.0,
        "completions/truncated_fraction": 0.5,
        "rollout/seconds": 30.0 if step == 1 else 1.0,
        "rollout/tokens_per_second": 1000.0 * step,
        "agreement/logprob_abs_diff_max": 2e-5,
        "agreement/logprob_abs_diff_mean": 0.0,
        "update/loss": float("nan") if step == 2 else 0.1,
        "update/grad_norm": 1.0,
        "update/kl": 0.01,
        "update/entropy": 0.5,
        "update/clip_fraction": 0.0,
        "update/seconds": 0.5,
        "weights/sync_seconds": 0.1,
        "step/seconds": 30.7 if step == 1 else 1.7,
        "memory/host_gib": 2.0,
        "compile/count": 42,
        "evaluation/greedy/exact_answer": 0.5,
    }


CHARTS = [
    "Reward",
    "Evaluation",
    "Completion length",
    "Truncated completions and idle groups",
    "Agreement of engine and trainer",
    "Time per stage",
    "Rollout speed",
    "Entropy",
    "KL to the reference",
    "Loss",
    "Gradient norm",
    "Memory",
]
"""Those of `metrics`, in order; no token was clipped, so that there is none of that."""


def leave_run(run_dir: Path, steps: int, *, name: str = "my-run", samples_every: int = 1, **settings: Any) -> Path:
    """Leave config, metrics and samples of a run of so many steps."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {"run": {"name": name, "max_steps": 10}, **settings}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    with closing(JsonlSink(run_dir, 0)) as sink:
        for step in range(1, steps + 1):
            sink.write(metrics(step))
            if step % samples_every == 0:
                sink.samples(step, sample_rows(step))
    return run_dir


def sample_rows(step: int) -> list[SampleRow]:
    """Six rows of different rewards; their texts are those of a page of HTML."""
    return [
        SampleRow(
            f"<b>prompt {step}",
            f"<script>alert({i})</script>",
            {"e": i, "f": None},
            i,
            -1.0,
            3,
            "length" if i else "stop",
            gold=f"gold <{step}>",
        )
        for i in range(6)
    ]


TALK_METRICS = {
    "episodes/turns_mean": 1.5,
    "episodes/turns_max": 3.0,
    "episodes/calls_mean": 1.0,
    "episodes/tokens_mean": 20.0,
    "episodes/observation_tokens_mean": 8.0,
    "turns/tokens_mean": 13.0,
    "episodes/ended_answered": 0.5,
    "episodes/ended_done": 0.0,
    "episodes/ended_turns": 0.25,
    "episodes/ended_tokens": 0.0,
    "episodes/ended_failed": 0.25,
    "turns/bad_calls": 0.25,
    "episodes/wait_seconds_mean": 0.5,
    "episodes/wait_seconds_max": 2.0,
}


def sampled_turn(text: str, calls: Sequence[str] = (), answer: str = "", errors: int = 0) -> dict[str, Any]:
    reward, observed = None if errors else 0.5, len(answer)
    turn = {"text": text, "calls": list(calls), "answer": answer, "reward": reward}
    return {**turn, "tokens": 12, "observed_tokens": observed, "errors": errors}


def conversation(ending: str, turns: Sequence[dict[str, Any]], **failure: str) -> dict[str, Any]:
    return {"environment": "calculator", "ending": ending, **failure, "turns": list(turns), "mask": []}


def leave_talks(run_dir: Path) -> Path:
    """Leave two steps of a run whose completions are conversations; texts are those of a page of HTML."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "<3>"}}\n</tool_call>'
    turns = (
        sampled_turn(f"I add the two numbers.\n{call}", ["add"], "Error: TypeError: b must be a number", 1),
        sampled_turn(call.replace('"<3>"', "3"), ["add", ""], "5\n" + "a long line of an answer " * 20),
        sampled_turn("The answer is <b>5</b>."),
    )
    talks = [
        conversation("answered", turns),
        conversation("turns", [sampled_turn("go on", [], "yes") for _ in range(15)]),
        conversation("failed", [sampled_turn("?", ["add"])], failure="late: took 60 s"),
    ]
    prompt = "<|im_start|>system\n# Tools\nadd(a: int, b: int)<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n"
    with closing(JsonlSink(run_dir, 0)) as sink:
        for step in (1, 2):
            sink.write({**metrics(step), **TALK_METRICS})
            rows = [
                SampleRow(prompt, f"text {value}", {"success": value}, value, 0.5, 36, "stop", conversation=talk)
                for talk, value in zip(talks, (1.0, 0.5, 0.0), strict=True)
            ]
            sink.samples(step, rows)
    return run_dir


def leave_evaluation(run_dir: Path, step: int, values: Sequence[float], *, gold: bool = True) -> None:
    """Leave an evaluation after a step: a value of exact_answer for each held-out prompt."""
    mean = sum(values) / len(values)
    name = "greedy/exact_answer"
    record = {"step": step, f"evaluation/{name}": mean, "evaluation/tokens/greedy": 3.0}
    with (run_dir / "evaluation.jsonl").open("a") as file:
        intervals = {name: [mean - 0.1, mean + 0.1, len(values)]}
        file.write(json.dumps({**record, "intervals": intervals, "digest": "x"}) + "\n")
    rows = [
        {
            "problem": number,
            "mode": mode,
            "sample": 0,
            "prompt": f"held out {number}",
            "completion": f"{mode} answer {number} after {step}",
            "answer": None,
            **({"gold": f"gold {number}"} if gold else {}),
            "rewards": {"exact_answer": value},
            "tokens": 3,
            "finish_reason": "stop",
        }
        for mode in ("greedy", "sampled")
        for number, value in enumerate(values)
    ]
    (run_dir / "evaluations").mkdir(exist_ok=True)
    (run_dir / "evaluations" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


CELLS = ("td", "th", "div", "small", "i")


class Page(HTMLParser):
    """Collects the tags of a page, its charts, its tables, and what it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.charts: dict[str, dict[str, Any]] = {}
        self.tables: list[list[list[str]]] = []
        self.words: list[str] = []
        self._in = ""
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in = tag
        values = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action") and v]
        if "data-chart" in values:
            self.charts[values["aria-label"] or ""] = json.loads(values["data-chart"] or "")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "tr", "table", "script", "style"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._cell and self._in in CELLS:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
