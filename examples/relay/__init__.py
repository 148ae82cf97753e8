"""The relay demo: a tiny language model, its engine, the agents that use it and the recipe that improves it.

What comes in: nothing but seeds. What goes out: chat completions in vLLM's wire format (`engine`), transcripts of the
agents' sessions (`agents`) and updated weights (`learning`). State: the weights and their version, in the engine's
memory; a crash loses them and the trainer publishes them again.
"""
