"""Chaos: the whole pipeline as processes under steady load, faults by a seed, and an oracle that counts every token.

In: a seed. Out: what was injected, what was lost or doubled, how long recovery took. State: a temporary folder with
the broker's data, the trainer's checkpoints and all logs. On a crash of this process all others end with it.
"""
