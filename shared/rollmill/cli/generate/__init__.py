"""``rollmill schemas``: the generated files of the source tree, from the models and the registry of topics.

`schemas` makes a JSON Schema per event, `topics` the documents and the README's table of topics, `settings` their names
and docs/settings.md, all pure; `files` compares them with the tree and writes them.
"""
