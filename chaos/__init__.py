"""Chaos tests: the pipeline as processes under steady load, faults by a seed, an oracle that counts every token.

Input: a seed. Output: the faults, what was lost or doubled, and recovery times. State: a temporary folder with the
broker's data, the trainer's checkpoints and all logs. If this process ends, all others end with it.

- `campaign`: several runs on one broker; `run`: one run, from start to result; `stack`: the processes of a run
- `load`: agents with known conversations; `faults`: which faults, and their injection (Jepsen's nemesis)
- `checks`: drain, recovery times, observations, and the oracle; `recompute`: every batch computed again
- `child`, `clock`, `trainer`: code inside the processes; `mutations`: faults put into the product, to test the harness
- `network_proxy`, `disk_image`, `supervisor_log`: the network, the broker's disk, and the supervisor's messages

Imports the library, the batcher (to compute its batches again) and the test kit; nothing imports it.
"""
