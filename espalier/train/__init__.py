"""The trainer behind the command line: job files, data, the loop, verification."""
