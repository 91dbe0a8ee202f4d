"""The contents of the folders of runs, read without torch, whatever state they are in."""
