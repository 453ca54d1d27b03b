"""The click commands of the trainer half: parse arguments, call the library, print."""
