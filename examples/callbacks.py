"""Logs runs to MLflow and to Trackio through callbacks; either library is imported only when its class is used.

uv run --with mlflow scripts/run.py 'logging.callbacks=[examples/callbacks.py:Mlflow]'
uv run --with trackio scripts/run.py 'logging.callbacks=[examples/callbacks.py:Trackio]'
"""

from collections.abc import Mapping, Sequence
from typing import Any

PROJECT = "tpu_grpo"


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Keep the metrics that are numbers, under names that MLflow accepts, such as pass_at_4 for pass@4."""
    return {
        name.replace("@", "_at_"): value
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float)
    }


class Mlflow:
    """Logs to the server of MLFLOW_TRACKING_URI, or below the working directory."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self.mlflow.set_experiment(PROJECT)
        self.mlflow.start_run(run_name=config["run"]["name"])
        self.mlflow.log_dict(config, "config.json")

    def on_step(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a step."""
        self.mlflow.log_metrics(numbers(metrics), step=metrics["step"])

    def on_evaluation(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the first evaluation; later ones are also among the metrics of their step."""
        if metrics["step"] == 0:
            self.on_step(metrics, samples)

    def close(self) -> None:
        """End the run in MLflow."""
        self.mlflow.end_run()


class Trackio:
    """Logs to Trackio's own files; ``trackio show`` opens them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio: Any = trackio
        self.trackio.init(project=PROJECT, name=config["run"]["name"], config=dict(config))

    def on_step(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a step."""
        self.trackio.log(numbers(metrics), step=metrics["step"])

    def on_evaluation(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the first evaluation."""
        if metrics["step"] == 0:
            self.on_step(metrics, samples)

    def close(self) -> None:
        """End the run in Trackio."""
        self.trackio.finish()
