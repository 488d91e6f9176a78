"""This room turns what a run measured into values, and writes them; report/ shows them.

values.py       turns the records of the stages into metric values, under the names of docs/metrics.md
episodes.py     measures conversations with environments;  conversations.py: one of them, as people read it
compilations.py counts the programs that XLA compiles in this process
memory.py       measures memory of this process and its devices
run_log.py      is the facade that a run talks to: one call per step, passed on to every sink
sinks.py        defines what a sink is, and the one that writes metrics.jsonl and samples.jsonl
console.py      shows a progress bar, or plain lines where there is no terminal
wandb_sink.py   logs to Weights & Biases;  tensorboard_sink.py: to TensorBoard
optional_sink.py lets the run go on when one of these fails
summary.py      writes summary.json
model_card.py   writes the page of an exported model
run_files.py    names every file of a run;  jsonl.py, lines.py: how they are written, and what is read back from them
"""
