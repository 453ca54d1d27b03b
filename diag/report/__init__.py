"""Reporters: a Report in, text out. One module per form, each a pure `render(report) -> str`; none computes."""
