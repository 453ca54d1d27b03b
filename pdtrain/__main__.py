"""`python -m pdtrain`, as launchers start it: torchrun -m pdtrain diag comm."""

from pdtrain.cli import main

if __name__ == "__main__":
    main()
