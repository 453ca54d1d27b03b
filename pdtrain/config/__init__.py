"""The typed run configuration: schema, presets, overrides, rules."""
