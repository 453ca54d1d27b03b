"""Moving a checkpoint between formats, layouts and families of names, without arithmetic and without torch.

`contents` reads a source into parameters and their states, `mapping` renames, cuts and joins them (`recipe`),
`targets/` lay out the files of a format to the byte (`plan`, `archive`, `pickles`), `engine` copies the bytes from
`source`, checks them and commits. `reshard` is the whole way.
"""
