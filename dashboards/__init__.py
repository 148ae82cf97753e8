"""Dashboards as code: what is shown (`overview`), as JSON for Grafana (`grafana`), and as pictures without it.

In: the catalogue of metrics. Out: `charts/rollmill/dashboards/*.json`, which the compose file and the chart use, and
`docs/metrics.md`. `recording` plays the demo under a real Prometheus, `preview` draws what that recorded.
"""
