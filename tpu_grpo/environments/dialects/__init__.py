"""What chat templates write around the turns of a conversation, in tokens.

dialect.py       the first prompt, what a turn says and calls, and the tokens after it
template.py      a chat template, and what it is told beside the messages
past.py          what the template does with earlier turns, found out at the start
thinking.py      thinking that it drops is cut out of the ids
data.py          text becomes ids; what an environment answers becomes no special token
formats.py       which way tool calls are written
json_calls.py    hermes and llama3;  xml_calls.py: qwen3_coder;  python_calls.py: python
values.py        what a tool may be called with
"""

from tpu_grpo.environments.dialects.dialect import Dialect, Following, open_dialect, turn_ends

__all__ = ["Dialect", "Following", "open_dialect", "turn_ends"]
