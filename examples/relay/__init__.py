"""The relay demo: a closed loop that learns on a CPU, through the whole chain, and checks itself.

What comes in: seeds. What goes out: a report, and an exit code that says whether every check was passed. State: the
weights and their version, in the engine's memory; everything else is on the log, under a prefix of the run's own.

The model's side: `task`, `model`, `sampler`, `microbatch`, `chat_wire`, `engine`. The agents' side: `agents`, `pacing`,
`admission`, `capture_sessions`, `transcripts`. What the pipeline imports by name: `evaluator`. The trainer's side:
`learning`, `training`. What looks on: `watch`, `display`; what judges: `oracle`, `gap`, `report`. What runs it all:
`options`, `pipeline`, `loop`, `run`, and `outside` in front of services that run already. What spoils it on purpose:
`sabotage`, `faulty_stream`.
"""
