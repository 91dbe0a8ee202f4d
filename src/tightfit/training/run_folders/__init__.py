"""What the folders of runs hold, read without torch, whatever state they are in."""
