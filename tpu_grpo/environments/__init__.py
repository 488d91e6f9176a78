"""Environments: what the policy has conversations with, of several turns and with tools.

actions.py          what passes between the policy's turns and an environment
dialects/           what a chat template writes around turns, in tokens
conversation.py     the state of one conversation
observations.py     what an environment answers, cut
episodes.py         all conversations of a batch
finding.py          a name leads to a class
loading.py          a name of the config becomes a class that is known to fit: what its constructor and reset take
schemas.py          its tools, and their schemas
pool.py             EnvironmentPool: the environments of this host, as the main process sees them
pooled.py           one of its conversations
forked.py           a process for each conversation, forked from a server that has imported the class (server.py)
shared.py           processes that have many conversations of an async environment on one loop each
starting.py         how long their import may take, and how often it may fail
fork_server.py, loop_server.py      the programs of these processes
requests.py         what these are asked, and what they say of themselves
playing.py          one environment that is played, in its process
tools.py            its public methods are tools, as in TRL
adapters/           or its ``step`` takes texts: Gym, Tunix, SkyRL-Gym, OpenEnv
values.py           what it gives becomes text or a number
kept.py             what is kept of it for the rewards
shipped/            environments that ship
"""
