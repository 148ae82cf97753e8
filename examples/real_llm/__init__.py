"""A real language model on a CPU, behind capture and builder: ``make demo-llm``.

SmolLM2-135M in llama.cpp, in one process with a small server that answers as vLLM does, with token ids and log-probs.
An agent with the stock ``openai`` client leads a dialogue through capture; the builder's traces are read from Kafka,
and their trained tokens must decode to exactly the texts that the agent saw.
"""
