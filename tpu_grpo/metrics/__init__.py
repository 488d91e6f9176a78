"""What a run measured, and where it is written.

values.py       records of the stages -> metric values under the contract's names
compilations.py XLA compilations of this process
run_log.py      the facade a run talks to: one call per step, to every sink
sinks.py        what a sink is, and the one that writes metrics.jsonl and samples.jsonl
console.py      progress bar, or plain lines where there is no terminal
wandb_sink.py   Weights & Biases
summary.py      summary.json
report.py       report.html, with plots.py and report_style.py
"""
