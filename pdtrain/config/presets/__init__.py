"""The configurations that ship with the package, by name."""
