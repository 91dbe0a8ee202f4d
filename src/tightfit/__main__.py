"""`python -m tightfit`: the command line, where its script is not on the path."""

from tightfit.cli import main

if __name__ == "__main__":  # a process that multiprocessing starts imports this file too
    main()
