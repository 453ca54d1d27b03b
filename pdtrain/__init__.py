"""The trainer, and the command line that ties the trainer and the doctor together."""
__version__ = "0.1.0"
