"""What is checked of a run: `recovery` times clients after a fault, `drain` waits until all sessions came through,
`observations` reads the log and the trainer's journal, and `oracle` compares them with what the agents saw (pure).
"""
