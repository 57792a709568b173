"""What runs inside a box: only the standard library, because a box holds little else.

The program and everything it starts are strangers to it: they have no capability, a system call filter, and cannot
signal or trace this side, which is process 1 of its own process namespace.
"""
