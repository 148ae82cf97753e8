"""What the services run on; private to this project.

`app` is the frame of every service: settings, signals, health, exit codes. `stream` is the stage engine on Kafka.
`kafka` has the clients, transactions, topics and the embedded broker; `claim_check` stores large values elsewhere.
`telemetry` has metrics, health, logs and clocks; `failpoints` lets tests fail a process at named places; `supervisor`
runs services as processes. What may import what is drawn in docs/architecture.md ("The floors of the house").
"""
