"""How modules are laid out over ranks: groups, tensor, expert and sharded data parallelism."""
