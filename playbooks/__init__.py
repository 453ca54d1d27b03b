"""Playbooks: one Markdown file per failure. A package, so that importlib.resources finds them when installed."""
